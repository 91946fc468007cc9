"""Each experiment whose data is at hand: the framework's loop against a loop by hand.

    python benchmarks/experiments.py

About 10 minutes. Both sides call the experiment's own `update` on the same batches, in one process,
in chunks in turn; each experiment in a process of its own. The framework's side is its real loop
with a log line every 50 steps; by hand nothing is logged. First both sides take some steps from one
state, and must come to the same state.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import cases
import haiku as hk
import jax
import numpy as np
import pairs
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import haikutrain
from haikutrain import config_file, devices, metrics, updates
from haikutrain.start import Task

# By experiment the steps a chunk: half a second or so.
RUNS = {
    "digits_resnet": 50,
    "cifar_resnet:digits": 10,
    "char_lm": 10,
    "byol": 25,
    "gan": 50,
}
TARGET = 0.99


def load(name: str) -> haikutrain.Experiment:
    """An experiment that only trains and logs, every 50 steps."""
    file, _, variant = name.partition(":")
    path = str(cases.ROOT / "experiments" / f"{file}.py")
    loaded = config_file.load(f"{path}:{variant}" if variant else path)
    experiment = loaded.experiment_class(cases.endless(loaded.config))
    experiment.eval_data = dict  # The end of a run is not evaluated either.
    return experiment


def make_update(experiment: haikutrain.Experiment) -> Callable[..., Any]:
    """(state, batch) -> (state, metrics), pmapped: the experiment's update, step and keys."""

    def update(state: Any, batch: Any) -> Any:
        sequence = hk.PRNGSequence(state.rng)
        (step_key,) = sequence.take(1)
        rng, _ = sequence.internal_state
        own = hk.PRNGSequence(jax.random.fold_in(step_key, lax.axis_index(haikutrain.AXIS)))
        with updates.tracing(state.step, experiment.config):
            new, metrics = experiment.update(state, batch, own)
        return new.replace(step=state.step + 1, rng=rng), metrics

    return jax.pmap(
        update, axis_name=haikutrain.AXIS, in_axes=(None, 0), out_axes=None, donate_argnums=0
    )


def batches(dataset: Any) -> Iterator[Any]:
    """Batches on the devices, `[D, B / D, ...]`, from step 0 on."""
    mesh = Mesh(np.array(jax.local_devices()), (haikutrain.AXIS,))
    place, count = NamedSharding(mesh, PartitionSpec(haikutrain.AXIS)), jax.local_device_count()
    for step in range(pairs.FAR):
        batch = {
            name: array.reshape(count, len(array) // count, *array.shape[1:])
            for name, array in dataset.batch(step).items()
        }
        yield jax.device_put(batch, place)


class Loop:
    """Trains an experiment by hand from `state` on, a chunk at a time."""

    def __init__(self, experiment: haikutrain.Experiment, state: Any):
        self.state = state
        self._update = make_update(experiment)
        self._batches = batches(experiment.train_data())
        self._batch = next(self._batches)

    def run(self, steps: int) -> float:
        """Seconds of so many steps, until the devices have done them."""
        started = time.perf_counter()
        state, batch = self.state, self._batch
        for _ in range(steps):
            state, _ = self._update(state, batch)
            batch = next(self._batches)
        state.step.block_until_ready()
        seconds = time.perf_counter() - started
        self.state, self._batch = state, batch
        return seconds


def checked_loop(experiment: haikutrain.Experiment, steps: int = 3) -> Loop:
    """A loop by hand that has taken some steps, which led where the framework's lead."""
    task = Task(experiment)
    state = task.programs.init()
    loop = Loop(experiment, devices.place(state))
    loop.run(steps)
    sums = devices.place(metrics.empty_window(task.programs.metric_names))
    with task.feed.items(((step, 1) for step in range(steps)), None) as items:
        for item in items:
            state, sums = task.programs.update(state, sums, item)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), loop.state, state
    )
    return loop


def measure(name: str, count: int, number: int) -> pairs.Row:
    devices.simulate(count)
    chunk, experiment = RUNS[name], load(name)
    with pairs.quiet():
        loop = checked_loop(experiment)
        paced = pairs.Paced(experiment, chunk)
        try:
            for _ in range(2):
                loop.run(chunk), paced()
            return pairs.compare(
                f"{name}, {count} device{'s' if count > 1 else ''}",
                paced,
                lambda: loop.run(chunk),
                number,
                per=chunk,
                target=TARGET,
            )
        finally:
            paced.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--experiment", choices=list(RUNS), help="only this one")
    parser.add_argument("--devices", type=int, default=1, help="simulated devices")
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    options = parser.parse_args()
    names = [options.experiment] if options.experiment else list(RUNS)
    if options.json:
        print(json.dumps(dataclasses.asdict(measure(names[0], options.devices, options.pairs))))
        return
    flags = ["--devices", options.devices, "--pairs", options.pairs, "--json"]
    rows = [pairs.row_of(__file__, "--experiment", name, *flags) for name in names]
    pairs.show(rows, "haikutrain", "by hand")


if __name__ == "__main__":
    main()
