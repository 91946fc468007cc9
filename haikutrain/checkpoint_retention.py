"""Which checkpoints of a directory stay, and what becomes of all else that lies there."""

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import shutil

from haikutrain.checkpoint_folder import STEP, Folder, list_steps
from haikutrain.errors import CheckpointDamaged, CheckpointUnreadable, UsageError

DAMAGED = ".damaged"
"""The folder inside a directory of checkpoints for what was found damaged."""

TRASH = ".trash"
"""The folder there that deleted checkpoints go through."""


def find_best(directory: pathlib.Path, metric: str, mode: str) -> int | None:
    """The step with the best `metric` by `mode` ("max" or "min"), the newest of equals.

    None if no checkpoint has a number for it; NaN is none.
    """
    sign = 1 if mode == "max" else -1
    scores = []
    for step in list_steps(directory):
        # A checkpoint that cannot be read, or that is gone by now, is not the best.
        with contextlib.suppress(CheckpointDamaged, CheckpointUnreadable, UsageError):
            value = Folder(directory, step).meta()["metrics"].get(metric, math.nan)
            if not math.isnan(value):
                scores.append((sign * value, step))
    return max(scores)[1] if scores else None


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints of a directory to keep: the newest `keep`, and the best by `metric`."""

    keep: int
    metric: str | None
    mode: str

    def best(self, directory: pathlib.Path) -> int | None:
        """The step best by the metric; None if there is none."""
        return None if self.metric is None else find_best(directory, self.metric, self.mode)

    def expired(self, directory: pathlib.Path) -> set[int]:
        """The steps that are not to be kept any more."""
        return set(list_steps(directory)[: -self.keep]) - {self.best(directory)}


def remove_leftovers(directory: pathlib.Path) -> None:
    """Removes what is half written or half deleted."""
    leftovers = directory.glob("*.orbax-checkpoint-tmp*")
    for path in [directory / TRASH, *leftovers]:
        shutil.rmtree(path, ignore_errors=True)


def other_folders(directory: pathlib.Path) -> list[str]:
    """The folders in a directory of checkpoints that are neither a step's nor hidden."""
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    return sorted(name for name in names if not STEP.fullmatch(name) and name[0] != ".")


def set_aside(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Moves what has a step's name into `.damaged/`, where nothing counts; returns its new path."""
    damaged = directory / DAMAGED
    damaged.mkdir(exist_ok=True)
    names = (str(step) if count == 1 else f"{step}-{count}" for count in itertools.count(1))
    target = next(damaged / name for name in names if not os.path.lexists(damaged / name))
    return (directory / str(step)).rename(target)
