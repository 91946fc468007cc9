"""The loop with logging every 50 steps, against a pmapped loop written by hand.

    python benchmarks/loop.py

About 10 minutes. Both sides run in one process, in chunks in turn; each case in a process of its
own, for the number of simulated devices. First both sides take the same batches from the same
state, and must come to the same losses.
"""

import argparse
import dataclasses
import json

import cases
import hand
import jax
import numpy as np
import pairs

import haikutrain
from haikutrain import devices
from haikutrain.start import Task

# Case, devices, steps a chunk, target.
RUNS = [("mlp", 1, 100, 0.95), ("mlp", 4, 50, 0.95), ("resnet", 1, 10, 0.99)]


def check_same_update(case: cases.Case, loop: hand.Loop) -> None:
    """Three steps by the framework's update and by hand: the same network state."""
    task = Task(case.experiment)
    state = task.programs.init()
    by_hand = jax.device_put(
        jax.tree.map(np.array, (state.params, state.network_state)), hand.sharding()
    )
    by_hand = (*by_hand, jax.device_put(case.optimizer.init(by_hand[0]), hand.sharding()))
    sums = devices.place(np.zeros(len(task.programs.metric_names), np.float32))
    with task.feed.items(((step, 1) for step in range(3)), None) as items:
        for item in items:
            by_hand, _ = loop.update(by_hand, item.batch)
            state, sums = task.programs.update(state, sums, item)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        by_hand[1],
        state.network_state,
    )


def measure(name: str, count: int, chunk: int, target: float, number: int) -> pairs.Row:
    devices.simulate(count)
    case = {"mlp": cases.mlp, "resnet": cases.resnet}[name]()
    arrays = haikutrain.digits("train")
    loop = hand.Loop(case.loss, case.optimizer, arrays, case.experiment.config.batch_size)
    with pairs.quiet():
        check_same_update(case, loop)
        paced = pairs.Paced(case.experiment, chunk)
        try:
            for _ in range(3):
                loop.run(chunk), paced()
            return pairs.compare(
                f"{name}, {count} device{'s' if count > 1 else ''}",
                paced,
                lambda: loop.run(chunk),
                number,
                per=chunk,
                target=target,
            )
        finally:
            paced.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--case", choices=["mlp", "resnet"], help="only this network")
    parser.add_argument("--devices", type=int, help="only this number of simulated devices")
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    options = parser.parse_args()
    runs = [
        run for run in RUNS if options.case in (None, run[0]) and options.devices in (None, run[1])
    ]
    if options.json:
        print(json.dumps(dataclasses.asdict(measure(*runs[0], options.pairs))))
        return
    flags = ["--pairs", options.pairs, "--json"]
    rows = [pairs.row_of(__file__, "--case", run[0], "--devices", run[1], *flags) for run in runs]
    pairs.show(rows, "haikutrain", "by hand")


if __name__ == "__main__":
    main()
