"""Two processes of two devices each, over gloo: the update against `lax.pmean` on trees.

    python benchmarks/gloo.py

About 10 minutes. Both sides call their pmapped update on a batch that is there already, in turn and
in step on both processes: the framework's packed mean, and the same update by hand with the trees
averaged as they are. For a ResNet-18 the collective alone, on a tree of its gradients' shapes.
"""

import argparse
import dataclasses
import functools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import cases
import jax
import numpy as np
import pairs
from peers import hand

from haikutrain import collectives, devices, metrics, processes
from haikutrain.start import Task

PROCESSES, DEVICES = 2, 2
# Case, steps a chunk, target.
RUNS = {
    "2 hidden layers": (10, 4.5),
    "4 hidden layers": (10, 6.0),
    "ResNet-18, collective": (1, 1.6),
}


def timed(call: Callable[[], Any], steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        result = call()
        # Further ahead, and gloo's threads would wait for one another.
        jax.block_until_ready(result)
    return time.perf_counter() - started


def updates(layers: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """One step by the framework's program, and one by hand."""
    case = cases.mlp(layers=layers)
    task = Task(case.experiment)
    with task.feed.items([(0, 1)], None) as items:
        item = next(items)
    state = task.programs.init()
    sums = devices.place(metrics.empty_window(task.programs.metric_names))
    own = [state, sums]
    loop = hand.TreesLoop(case)

    def framework() -> Any:
        own[:] = task.programs.update(*own, item)
        return own[1]

    def by_hand() -> Any:
        loop.state, means = loop.update(loop.state, batch)
        return means["loss"]

    batch = jax.tree.map(np.asarray, item.batch)
    batch = jax.device_put(batch, hand.sharding(hand.AXIS))
    return framework, by_hand


def means() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The mean over the devices of a tree like a ResNet-18's gradients, packed and as it is."""
    made = Task(cases.resnet18().experiment).programs
    tree = jax.tree.map(
        lambda x: jax.device_put(
            np.ones((jax.local_device_count(), *x.shape), np.float32), hand.sharding(hand.AXIS)
        ),
        made.state.params,
    )
    packed = jax.pmap(collectives.pmean, axis_name=collectives.AXIS)
    plain = jax.pmap(hand.tree_pmean, axis_name=hand.AXIS)
    return lambda: packed(tree), lambda: plain(tree)


def measure(index: int, port: int, number: int, names: list[str]) -> list[pairs.Row]:
    devices.simulate(DEVICES)
    address = f"127.0.0.1:{port}"
    processes.start("on", address=address, num_processes=PROCESSES, process_id=index)
    rows = []
    for name in names:
        chunk, target = RUNS[name]
        first, second = means() if "collective" in name else updates(int(name[0]))
        sides = [functools.partial(timed, call, chunk) for call in (first, second)]
        for side in sides:
            side()
        rows.append(pairs.compare(name, *sides, number, per=chunk, target=target))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--case", choices=list(RUNS), help="only this one")
    parser.add_argument("--process", type=int, help="be this process, print JSON")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    names = [options.case] if options.case else list(RUNS)
    if options.process is not None:
        rows = measure(options.process, options.port, options.pairs, names)
        print(json.dumps([dataclasses.asdict(row) for row in rows]), flush=True)
        sys.exit(processes.leave(0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--port", str(port), "--pairs", str(options.pairs)]
    command += ["--case", options.case] if options.case else []
    job = [
        subprocess.Popen([*command, "--process", str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(PROCESSES)
    ]
    try:
        outputs = [process.communicate()[0] for process in job]
    finally:
        for process in job:
            process.kill()
    rows = [pairs.Row(**row) for row in json.loads(outputs[0].splitlines()[-1])]
    pairs.show(rows, "haikutrain", "on trees")


if __name__ == "__main__":
    main()
