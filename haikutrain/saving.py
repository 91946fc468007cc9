"""Saving a run: what a checkpoint consists of, how it is judged, and what to do when it fails."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from absl import logging

from haikutrain import devices, os_errors
from haikutrain.checkpoint import Checkpointer
from haikutrain.checkpoint_folder import list_steps
from haikutrain.checkpoint_process import WriterDied
from haikutrain.errors import NonFinite, SavesFailed
from haikutrain.hooks import Log, StepInfo
from haikutrain.leaves import Keys
from haikutrain.metrics import Window
from haikutrain.staging import Staging
from haikutrain.start import Task
from haikutrain.writers import MetricWriter


class ReplicasDiffer(RuntimeError):
    """An update gave different values on different devices; the message names the leaves."""


class Saves:
    """The saves of a run. A save that fails is reported, and training goes on.

    The log is on disk up to a step before that step's checkpoint is: a run that resumes from it
    never writes those lines again. So a log that cannot be written is a save that fails.

    Attributes:
      last: the step of the last save, under way or done; None if there was none, or it failed.

    Args:
      task: the run's.
      checkpointer: a writer; closed by whoever made it.
      log: settled before each save.
      window: the open one.
      writer: what the log goes to.
      evaluate: evaluates a state, unless that was done, and puts the result into the StepInfo.
    """

    def __init__(
        self,
        task: Task,
        checkpointer: Checkpointer,
        log: Log,
        window: Window,
        writer: MetricWriter,
        evaluate: Callable[[StepInfo], None],
    ):
        self._task = task
        self._checkpointer = checkpointer
        self._log = log
        self._window = window
        self._writer = writer
        self._evaluate = evaluate
        self._staging = Staging(checkpointer.buffers)
        self._started = False
        self.last: int | None = None
        self._under_way: int | None = None
        self._failed: Exception | None = None
        self._failures = 0

    def save(self, info: StepInfo, position: Any, *, ended: str | None, judged: bool) -> None:
        """Starts to save the state, once the save before is done; it may still fail, see `poll`.

        Args:
          info: of the step.
          position: the input's, after this step.
          ended: why the run ends here, None if it can go on.
          judged: whether the checkpoint takes part in the comparison by `config.best_metric`.

        Raises:
          SavesFailed: `config.max_failed_saves` in a row have failed.
          ReplicasDiffer: the state is not equal on all devices.
          UsageError: the state or the position cannot be stored.
        """
        self._settle()
        self._log.settle(info)
        with self._log.stopwatch.paused():
            if self._task.best_metric is not None and judged:
                self._evaluate(info)
            if different := devices.drifted(info.state):
                raise ReplicasDiffer(
                    f"at step {info.step} these are not equal on all devices: "
                    f"{', '.join(different)}; average them in update (haikutrain.pmean, "
                    "haikutrain.apply_gradients)"
                )
            metrics = _metrics(info)
            if judged:
                self._task.check_judged(metrics)
            meta = self._task.meta(self._window.to_json(), ended)
            try:
                self._writer.flush()
                self._checkpointer.save(
                    info.step,
                    self._staging.copy(info.state) if devices.is_main_process() else info.state,
                    meta=meta,
                    data=position,
                    metrics=metrics,
                    before=functools.partial(self._before, info.step),
                )
            except (OSError, WriterDied) as error:
                self._fail(info.step, error)
            else:
                self._under_way = self.last = info.step

    def poll(self) -> None:
        """Reports a save that has failed since the last call. Meant to be called every step.

        Raises:
          SavesFailed: `config.max_failed_saves` in a row have failed.
          NonFinite: params are not finite.
        """
        if not self._started:
            # After the first step, which it would hold up.
            self._started = True
            with contextlib.suppress(OSError, WriterDied):  # The save will say so.
                self._checkpointer.start_writer()
        if self._under_way is not None and self._checkpointer.is_idle():
            self._settle()

    def finish(self) -> None:
        """Waits for the last save of a run; raises SavesFailed if that failed."""
        self._settle()
        if self._failed is not None:
            raise SavesFailed(
                f"the last checkpoint of the run could not be saved: "
                f"{os_errors.reason(self._failed)}; {self._what_is_left(self._failed)}"
            ) from self._failed

    def close(self) -> None:
        """Waits for the save under way; raises nothing: a failure is reported only."""
        try:
            self._settle()
        except (SavesFailed, NonFinite) as error:
            logging.error("%s", error)

    def _before(self, step: int, arrays: Mapping[Keys, np.ndarray]) -> None:
        """What a commit waits for; in the checkpointer's thread."""
        self._writer.sync()
        bad = [
            "/".join(keys)
            for keys, array in arrays.items()
            if keys[0] == "params" and not _is_finite(array)
        ]
        if bad:
            raise NonFinite(
                f"step {step}: these are not finite: {', '.join(bad[:5])}; nothing of it was "
                "saved, the newest checkpoint is from before"
            )

    def _settle(self) -> None:
        """Waits for the save under way and counts it."""
        if self._under_way is None:
            return
        try:
            self._checkpointer.wait()
        except NonFinite:
            self._under_way = None
            raise
        except Exception as error:
            step, self._under_way = self._under_way, None
            self._fail(step, error)
        else:
            self._under_way = self._failed = None
            self._failures = 0

    def _fail(self, step: int, error: Exception) -> None:
        self._failed, self.last = error, None
        self._failures += 1
        reason, limit = os_errors.reason(error), self._task.config.max_failed_saves
        logging.error(
            "the checkpoint of step %d could not be saved: %s (failure %d of %d in a row)",
            step,
            reason,
            self._failures,
            limit,
        )
        logging.debug("where it failed", exc_info=error)
        if self._failures >= limit:
            raise SavesFailed(
                f"too many saves in a row have failed (max_failed_saves={limit}), the last at "
                f"step {step}: {reason}; {self._what_is_left(error)}"
            ) from error

    def _what_is_left(self, error: BaseException) -> str:
        steps = list_steps(self._checkpointer.directory)
        left = f"the newest is of step {steps[-1]}" if steps else "there is no checkpoint"
        folder = self._checkpointer.directory
        mend = f"make room in {folder}, or make it writable, and "
        return f"{left}; {mend if os_errors.is_of_a_disk(error) else ''}start again"


def _is_finite(array: np.ndarray) -> bool:
    # Either of them is NaN if any element is; and nothing of the array's size is made.
    return not array.size or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _metrics(info: StepInfo) -> Mapping[str, float]:
    """What the evaluation of this very step found, by `split/name`."""
    current = info.evaluations if info.evaluations_step == info.step else {}
    return {
        f"{split}/{name}": value
        for split, values in current.items()
        for name, value in values.items()
    }
