"""An evaluation job beside training: each checkpoint is evaluated once, as it appears.

It only reads what the trainer writes, and keeps no state but `metrics_eval.jsonl`: whatever stands
there is not evaluated again.
"""

import contextlib
import json
import os
import sys
import time

import jax
from absl import logging

from haikutrain import devices, evaluation, writers
from haikutrain.checkpoint import Checkpointer
from haikutrain.console import Console
from haikutrain.errors import (
    CheckpointDamaged,
    CheckpointMissing,
    CheckpointUnreadable,
    UsageError,
)
from haikutrain.experiment import Experiment
from haikutrain.start import Task
from haikutrain.workdir import Workdir

_SECONDS_BETWEEN_LOOKS = 1.0


def follow(experiment: Experiment, workdir: str | os.PathLike[str]) -> None:
    """Evaluates every checkpoint of a run, oldest first, until the run has ended.

    A checkpoint that the trainer deletes before its turn comes is left out, and so is a damaged
    one: `config.keep_checkpoints` must be enough for an evaluation to keep up.

    Args:
      experiment: the one that is trained.
      workdir: the folder of its run; need not exist yet.

    Raises:
      UsageError: there is nothing to evaluate on; the checkpoints do not fit the experiment; the
        run is being followed already.
    """
    task = Task(experiment)
    if not task.eval_feeds:
        raise UsageError(f"{task.name} has no eval_data, so there is nothing to evaluate on")
    if jax.process_count() > 1:
        raise UsageError(f"--follow runs in one process, and here are {jax.process_count()}")
    folder = Workdir(workdir)
    folder.check_writable()
    logging.info("waiting for checkpoints in %s", folder.checkpoints)
    with contextlib.closing(_Follower(task, folder)) as follower:
        while not follower.has_ended():
            if not follower.evaluate_next():
                time.sleep(_SECONDS_BETWEEN_LOOKS)


class _Follower:
    """What one start of the job keeps."""

    def __init__(self, task: Task, folder: Workdir):
        self._task = task
        self._folder = folder
        self._checkpointer = Checkpointer(folder.checkpoints, read_only=True)
        self._writer: writers.Writers | None = None
        # For each step the splits that `metrics_eval.jsonl` has.
        self._done: dict[int, set[str]] = {}
        # Each with what tells it from one that is written anew.
        self._damaged: dict[int, tuple[int, int]] = {}
        self._unreadable: set[int] = set()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._folder.close()

    def has_ended(self) -> bool:
        """Whether the run has ended, and all its checkpoints are evaluated and written down."""
        steps = self._checkpointer.steps()
        if not steps:
            return False
        self._open()
        if self._left(steps):
            return False
        try:
            if self._checkpointer.read_meta(steps[-1])["ended"] is None:
                return False
        except (CheckpointMissing, CheckpointDamaged, CheckpointUnreadable):
            return False
        return self._is_written()

    def evaluate_next(self) -> bool:
        """Evaluates the oldest checkpoint that is left; whether there was one to evaluate."""
        for step in self._left(self._checkpointer.steps()):
            try:
                self._evaluate(step)
                return True
            except CheckpointMissing:
                logging.info("the checkpoint of step %d was deleted before it was evaluated", step)
            except CheckpointDamaged as error:
                logging.warning("%s; left out", error)
                self._damaged[step] = self._identity(step)
            except CheckpointUnreadable as error:
                if step not in self._unreadable:
                    logging.warning("%s; trying again", error)
                self._unreadable.add(step)
        return False

    def _left(self, steps: list[int]) -> list[int]:
        splits = self._task.eval_feeds.keys()
        return [
            step
            for step in steps
            if splits - self._done.get(step, set())
            and self._damaged.get(step) != self._identity(step)
        ]

    def _evaluate(self, step: int) -> None:
        self._folder.check_owner(self._task.name)
        state = self._checkpointer.restore(step, self._task.programs.state).state
        results = evaluation.evaluate_splits(self._task, devices.place(state))
        done = self._done.setdefault(step, set())
        new = {split: result for split, result in results.items() if split not in done}
        assert self._writer is not None
        evaluation.write(self._writer, step, new)
        done.update(new)
        self._is_written()

    def _is_written(self) -> bool:
        """Whether all results are on disk; what a full disk refuses is tried again each time."""
        assert self._writer is not None
        try:
            self._writer.flush()
            self._writer.sync()
        except OSError:
            return False  # The writer has said so.
        return True

    def _identity(self, step: int) -> tuple[int, int]:
        try:
            found = os.stat(self._folder.checkpoints / str(step))
        except OSError:
            return 0, 0
        return found.st_ino, found.st_mtime_ns

    def _open(self) -> None:
        """Begins to write, now that there is a run."""
        if self._writer is not None:
            return
        self._folder.check_owner(self._task.name)
        self._folder.lock(".lock-follow")
        with self._folder.writing():
            log = writers.JsonLines(self._folder.metrics_eval, resume_step=sys.maxsize)
        for text in self._folder.metrics_eval.read_text().splitlines():
            line = json.loads(text)
            self._done.setdefault(line["step"], set()).add(line.get("split"))
        media, console = (
            writers.MediaFiles(self._folder.media),
            Console(self._task.config.num_steps),
        )
        self._writer = writers.Writers([log, media, console])
