"""Checks of the compiled programs: many steps a call; memory, FLOPs, and what a checkpoint is."""

import pathlib
import time
from typing import Any

import jax
import numpy as np

from haikutrain import devices, leaves
from haikutrain.check_devices import compare
from haikutrain.check_table import Row, broken, held, measured, unchecked
from haikutrain.check_watch import Steps
from haikutrain.checkpoint import Checkpointer
from haikutrain.feed import TrainItem
from haikutrain.metrics import empty_window
from haikutrain.start import Task

CALLS = "many steps a call, the same losses"


def calls_row(steps: Steps, tolerance: float) -> Row:
    """Runs the first steps again, several in one call."""
    task = steps.task
    count = min(max(task.config.steps_per_call, 2), len(steps.batches))
    if count < 2:
        return unchecked(CALLS, "the run has one step")
    stacked = jax.tree.map(lambda *x: np.stack(x), *steps.batches[:count])
    item = TrainItem(count, devices.place_batch(stacked, stacked=True), None)
    names = task.programs.metric_names
    state, sums = task.programs.update(devices.place(steps.first), _zeros(task), item)
    jax.block_until_ready(state)
    together = dict(zip(names, np.asarray(sums)[: len(names)].tolist(), strict=True))
    singly = {name: sum(m[name] for m in steps.metrics[:count]) for name in steps.metrics[0]}
    if different := compare([singly], [together], tolerance * 10 ** (count - 1)):
        return broken(
            CALLS,
            f"summed over {count} steps, {different.replace(' of step 1', '')}",
            "in one call the steps run in a loop: the update depends on something that is not in "
            "its arguments",
        )
    return held(CALLS, f"{count} steps in one call")


def cost_row(task: Task, steps: Steps) -> Row:
    """Memory and FLOPs of the compiled step of the experiment itself, which is not watched."""
    what = f"a step on each of {devices.describe()}"
    compiled = task.programs.executable(steps.item)
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
    if memory is None:
        return unchecked(what, "the compiler does not say what it needs")
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes
    needed += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    flops = (costs or {}).get("flops")
    counted = f"; {flops:.3g} FLOPs" if flops else ""
    return measured(
        what,
        f"{size(needed)} of memory, {size(memory.temp_size_in_bytes)} of it for what lies between "
        f"the layers{counted}",
    )


def checkpoint_row(task: Task, state: Any, folder: pathlib.Path) -> tuple[Row, float]:
    """How large a checkpoint is, and how many seconds one takes to write."""
    table = leaves.by_path(state)
    total = sum(leaves.describe(path, leaf).nbytes for path, leaf in table.items())
    window = {"names": task.programs.metric_names, "sums": [], "count": 0}
    checkpointer = Checkpointer(folder / "saved")
    try:
        for step in (1, 2):  # The first one imports and sets up.
            began = time.perf_counter()
            copy, meta = devices.snapshot(state), task.meta(window, None)
            checkpointer.save(step, copy, meta=meta, data=task.feed.position, metrics={})
            checkpointer.wait()
            seconds = time.perf_counter() - began
    finally:
        checkpointer.close()
    kept = task.config.keep_checkpoints
    text = f"{size(total)}, {kept} are kept: {size(kept * total)}; written in {seconds:.2g} s"
    return measured("a checkpoint", text), seconds


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _zeros(task: Task) -> Any:
    return devices.place(empty_window(task.programs.metric_names))
