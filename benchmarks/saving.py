"""What a save costs the loop, how long it takes, and how many bytes it writes.

    python benchmarks/saving.py --params=25e6
    python benchmarks/saving.py --params=100e6

An MLP of that many float32 parameters is trained with Adam, so that the state is three times that,
with a checkpoint every few steps. Between saves the same bytes are copied once in memory, into
pages touched before, and, when all is done, written by `np.save` with fsync in turn with saves that
have the machine to themselves.
"""

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

import cases
import jax
import numpy as np
import pairs

import haikutrain
from haikutrain import devices
from haikutrain.checkpoint import Checkpointer
from haikutrain.saving import Saves
from haikutrain.staging import Staging

PERIOD = 16
MEMCPY_AT = 12


class Clock:
    """A hook that notes when each step was done, and copies the state's bytes once a period."""

    def __init__(self, workdir: pathlib.Path):
        self.checkpoints = workdir / "checkpoints"
        self.seconds: list[float] = []
        self.flying: list[bool] = []
        self.memcpy: list[float] = []
        self.buffers: list[np.ndarray] = []
        self.before = 0.0
        self.calls: list[float] = []
        self._time_calls()

    def _time_calls(self) -> None:
        save = Saves.save

        def timed(*args: Any, **kwargs: Any) -> None:
            begun = time.perf_counter()
            save(*args, **kwargs)
            self.calls.append(time.perf_counter() - begun)

        Saves.save = timed  # type: ignore[method-assign]

    def __call__(self, info: haikutrain.StepInfo) -> None:
        info.state.step.block_until_ready()
        self.seconds.append(time.perf_counter() - self.before)
        self.flying.append(any(self.checkpoints.glob("*tmp*")))
        if info.step % PERIOD == MEMCPY_AT:
            self._copy(info.state)
        self.before = time.perf_counter()

    def _copy(self, state: haikutrain.TrainState) -> None:
        arrays = [np.array(x.addressable_data(0)) for x in jax.tree.leaves(state)]
        self.buffers = self.buffers or [np.ones_like(a) for a in arrays]
        begun = time.perf_counter()
        for buffer, array in zip(self.buffers, arrays, strict=True):
            np.copyto(buffer, array)
        self.memcpy.append(time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=25e6)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1, help="simulated devices")
    parser.add_argument("--folder", help="on the disk to measure; else the temporary one")
    options = parser.parse_args()
    devices.simulate(options.devices)
    case = cases.mlp(width=int(options.params**0.5))
    config = case.experiment.config
    config.num_steps, config.checkpoint_every = PERIOD * (options.saves + 2), PERIOD
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch, pairs.quiet():
        workdir = pathlib.Path(scratch) / "work"
        clock = Clock(workdir)
        case.experiment.hooks = lambda: [clock]  # type: ignore[method-assign]
        state = haikutrain.train(case.experiment, workdir)
        found = {**of_the_loop(clock), **alone(state, pathlib.Path(scratch), options.saves)}
    print(json.dumps(found, indent=2))


def of_the_loop(clock: Clock) -> dict[str, float]:
    """Seconds of a save as the loop feels it, and of one memcpy of the state."""
    seconds, flying = np.array(clock.seconds), np.array(clock.flying)
    calm = [s for n, s in enumerate(seconds) if not flying[n] and n % PERIOD > 3 and n > PERIOD]
    usual = statistics.median(calm)
    # Seconds [n] is from the end of step n to that of n + 1, and a save comes after its step. The
    # first save touches its pages for the first time.
    starts = range(2 * PERIOD, len(seconds) - 3, PERIOD)
    taken = [seconds[n : n + 3].sum() - 3 * usual for n in starts]
    busy = [s for n, s in enumerate(seconds) if flying[n] and n % PERIOD > 2 and n > 2 * PERIOD]
    memcpy = statistics.median(clock.memcpy[1:])
    return {
        "usual step, ms": 1e3 * usual,
        "a save takes from the loop, ms": 1e3 * statistics.median(taken),
        "of which, lowest and highest": [round(1e3 * t, 1) for t in (min(taken), max(taken))],
        "the call alone, ratio to memcpy": statistics.median(clock.calls[1:]) / memcpy,
        "the first save takes, ms": 1e3 * (seconds[PERIOD : PERIOD + 3].sum() - 3 * usual),
        "memcpy of the state, ms": 1e3 * memcpy,
        "ratio (<= 1.5)": statistics.median(taken) / memcpy,
        "steps during a save": len(busy),
        "speed while a save is in flight (>= 0.9)": usual / statistics.median(busy or [np.nan]),
    }


def alone(state: haikutrain.TrainState, folder: pathlib.Path, times: int) -> dict[str, float]:
    """Seconds of a whole save with nothing beside it, and of `np.save` and fsync of its bytes."""
    arrays = [np.array(leaf.addressable_data(0)) for leaf in jax.tree.leaves(state)]
    size = sum(array.nbytes for array in arrays)
    ours, theirs, disk = [], [], 0
    checkpointer = Checkpointer(
        folder / "alone", keep=times
    )  # The other side deletes off the clock.
    staging = Staging(checkpointer.buffers)
    for number in range(1, times + 1):
        begun = time.perf_counter()
        meta = {"experiment": "", "config": {}, "data": {}, "window": {}, "ended": None}
        checkpointer.save(number, staging.copy(state), meta=meta, data=None)
        checkpointer.wait()
        ours.append(time.perf_counter() - begun)
        if number == times:
            files = [p for p in (folder / "alone" / str(number)).rglob("*") if p.is_file()]
            disk = sum(p.stat().st_size for p in files)
        begun = time.perf_counter()
        for index, array in enumerate(arrays):
            with open(folder / f"{index}.npy", "wb") as file:
                np.save(file, array)
                os.fsync(file.fileno())
        theirs.append(time.perf_counter() - begun)
        for index in range(len(arrays)):
            (folder / f"{index}.npy").unlink()
    checkpointer.close()
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "a whole save, s": statistics.median(ours),
        "np.save and fsync, s": statistics.median(theirs),
        "ratio of these (<= 1.5)": statistics.median(ratios),
        "quartiles": [round(q, 2) for q in statistics.quantiles(ratios, n=4)],
        "bytes on disk / bytes of the state (<= 1.01)": disk / size,
    }


if __name__ == "__main__":
    main()
