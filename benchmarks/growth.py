"""How the framework's own cost grows: with the leaves of a state, with steps, with saves.

    python benchmarks/growth.py

About 15 minutes, most of it compiling 10,000 leaves. The loop with everything on but saves, against
the bare call of the same compiled update in a loop, in turn, for states of 10 to 10,000 leaves;
then the time of a step over many steps; then the resident memory over 200 saves. Each in a process
of its own.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import cases
import haiku as hk
import jax.numpy as jnp
import numpy as np
import optax
import pairs

import haikutrain
from haikutrain import devices, metrics
from haikutrain.start import Task

# Leaves, steps a chunk.
LEAVES = [(10, 500), (100, 300), (1000, 50), (10_000, 6)]
PAGE = 4096


class Leaves(haikutrain.Experiment):
    """So many parameters of `config.size` numbers, each with a gradient."""

    def loss(self, batch: Any, is_training: bool) -> Any:
        shape = [self.config.size]
        ones = hk.initializers.Constant(1.0)
        leaves = [hk.get_parameter(f"w{i}", shape, init=ones) for i in range(self.config.leaves)]
        scale = batch["x"][:, 0]
        return scale * sum(jnp.mean(w**2) for w in leaves), {}

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(1e-6)

    def train_data(self) -> Any:
        x = np.ones((4096, 1), np.float32)
        return haikutrain.ArrayDataset({"x": x}, self.config.batch_size, seed=0)


def experiment(leaves: int, size: int = 8) -> haikutrain.Experiment:
    config = cases.endless(haikutrain.base_config())
    config.batch_size, config.leaves, config.size = 16, leaves, size
    return Leaves(config)


class Bare:
    """Calls the compiled update on one batch, and does nothing else."""

    def __init__(self, made: haikutrain.Experiment):
        task = Task(made)
        with task.feed.items([(0, 1)], None) as items:
            self._item = next(items)
        self._update, self._state = task.programs.update, task.programs.init()
        self._sums = devices.place(metrics.empty_window(task.programs.metric_names))

    def run(self, steps: int) -> float:
        ahead = devices.RunAhead()
        started = time.perf_counter()
        for _ in range(steps):
            self._state, self._sums = self._update(self._state, self._sums, self._item)
            ahead.add(self._sums)
        self._sums.block_until_ready()
        return time.perf_counter() - started


def against_bare(leaves: int, chunk: int, number: int) -> pairs.Row:
    with pairs.quiet():
        bare = Bare(experiment(leaves))
        paced = pairs.Paced(experiment(leaves), chunk)
        try:
            for _ in range(3):
                bare.run(chunk), paced()
            return pairs.compare(
                f"{leaves} leaves", paced, lambda: bare.run(chunk), number, per=chunk, target=0.95
            )
        finally:
            paced.close()


def resident() -> float:
    """Of this process now, in MB."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6


def over_steps(steps: int) -> list[dict[str, float]]:
    """The median microseconds a step in each tenth of a run, and the resident memory after it."""
    made = experiment(10)
    tenth = steps // 10
    part = max(1, tenth // 100)
    times: list[float] = []
    tenths = []

    def note(info: haikutrain.StepInfo) -> None:
        times.append(time.perf_counter())
        if info.step % tenth == 0:
            spans = np.diff(times[-101:]) / part * 1e6
            tenths.append({"us": float(np.median(spans)), "MB": resident()})

    made.config.num_steps = steps
    made.hooks = lambda: [haikutrain.every(part, note)]  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as workdir, pairs.quiet():
        haikutrain.train(made, workdir)
    return tenths


def over_saves(saves: int) -> list[dict[str, float]]:
    """The resident memory after each save but the last; the state is 12 MB."""
    made = experiment(3, 1 << 20)
    made.config.checkpoint_every, made.config.num_steps = 2, 2 * saves + 2
    found = []
    made.hooks = lambda: [  # type: ignore[method-assign]
        haikutrain.every(2, lambda info: found.append({"MB": resident()}))
    ]
    with tempfile.TemporaryDirectory() as workdir, pairs.quiet():
        haikutrain.train(made, workdir)
    return found[1:]


def show_growth(steps: int, saves: int) -> None:
    tenths = pairs.in_fresh_process(__file__, "--over_steps", steps)
    print(f"\n{steps:,} steps of 10 leaves, by tenths:")
    print("us a step:   ", "  ".join(f"{t['us']:.1f}" for t in tenths))
    print("resident MB: ", "  ".join(f"{t['MB']:.0f}" for t in tenths))
    print(f"last tenth against the second: {tenths[-1]['us'] / tenths[1]['us']:.3f} (1 to reach)")
    resident_mb = [t["MB"] for t in pairs.in_fresh_process(__file__, "--over_saves", saves)]
    print(f"\nresident MB over {saves} saves of 12 MB, medians of twentieths:")
    size = max(1, len(resident_mb) // 20)
    parts = [resident_mb[i : i + size] for i in range(0, len(resident_mb), size)]
    print("  ".join(f"{statistics.median(part):.0f}" for part in parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=300, help="for 10,000 leaves a tenth of it")
    parser.add_argument("--leaves", type=int, help="only so many")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--over_steps", type=int, help="measure here, print JSON")
    parser.add_argument("--over_saves", type=int, help="measure here, print JSON")
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    options = parser.parse_args()
    devices.simulate(1)
    if options.over_steps:
        print(json.dumps(over_steps(options.over_steps)))
        return
    if options.over_saves:
        print(json.dumps(over_saves(options.over_saves)))
        return
    runs = [run for run in LEAVES if options.leaves in (None, run[0])]
    number = options.pairs
    if options.json:
        print(json.dumps(dataclasses.asdict(against_bare(*runs[0], number))))
        return
    rows = []
    for leaves, _ in runs:
        own = max(15, number // 10) if leaves >= 10_000 else number
        rows.append(pairs.row_of(__file__, "--leaves", leaves, "--pairs", own, "--json"))
    pairs.show(rows, "haikutrain", "bare call")
    if options.leaves is None:
        show_growth(options.steps, options.saves)


if __name__ == "__main__":
    main()
