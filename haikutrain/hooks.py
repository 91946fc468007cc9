"""Hooks: functions of a StepInfo, called after every call of the update. They watch.

The loop calls them in this order: log, evaluate, the experiment's own, save, progress. The save
comes last, so that it knows whether a hook has ended the run.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from haikutrain.errors import UsageError
from haikutrain.metrics import Window

Hook = Callable[["StepInfo"], None]


@dataclasses.dataclass
class StepInfo:
    """What a hook sees."""

    step: int
    """Batches consumed so far, this call's included."""
    steps: int
    """How many of them in this call: 1, or `config.steps_per_call`."""
    num_steps: int
    """Where the run ends."""
    state: Any
    """The TrainState, on the devices; valid only during the call: the next step donates it."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Training metrics: means over the last log window that was closed and fetched."""
    metrics_step: int | None = None
    """The last step of that window; None before the first."""
    evaluations: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """The last evaluation, by split."""
    evaluations_step: int | None = None
    """The step of that evaluation; None before the first."""
    stop_reason: str | None = None
    """Why a hook ends the run here."""

    def stop(self, reason: str) -> None:
        """Ends the run after this step: with a log line, an evaluation and a save."""
        self.stop_reason = reason

    def crossed(self, period: int) -> bool:
        """Whether a multiple of `period` was among the steps of this call."""
        return self.step // period > (self.step - self.steps) // period


def every(period: int, hook: Hook) -> Hook:
    """A hook that runs `hook` every `period` steps, at their multiples.

    With `steps_per_call` > 1 it runs at the end of the call that holds such a multiple.
    """
    if period < 1:
        raise UsageError(f"every({period}, ...): the period must be at least 1 step")

    def periodic(info: StepInfo) -> None:
        if info.crossed(period):
            hook(info)

    return periodic


class Stopwatch:
    """Seconds that training takes, without what is done between steps."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._pauses = 0

    def restart(self) -> float:
        """Seconds since the last restart."""
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        return seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here does not count. May be nested."""
        before = time.perf_counter()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._started += time.perf_counter() - before


class Log:
    """Closes the metrics' window every `period` steps, and hands its means on, one call later.

    By then the next step is on its way, so that waiting for the numbers does not idle the devices;
    and it is always the same call, so that a hook that acts on them acts at the same step in every
    run.

    Args:
      window: the open window.
      period: in steps.
      batch_size: the rows of a global batch.
      write: is given the step and the means.
    """

    def __init__(
        self,
        window: Window,
        period: int,
        batch_size: int,
        write: Callable[[int, dict[str, float]], None],
    ):
        self.stopwatch = Stopwatch()
        self._window = window
        self._period = period
        self._batch_size = batch_size
        self._write = write
        self._timed: int | None = None
        self._closed: tuple[int, Any, int, int] | None = None
        self._latest: tuple[dict[str, float], int | None] = {}, None

    def __call__(self, info: StepInfo) -> None:
        self.deliver(info)
        if self._timed is None:
            # Speeds count from the end of the first call, which compiled.
            self._window.wait(info.step)
            self.stopwatch.restart()
            self._timed = -info.steps
        self._timed += info.steps
        if info.crossed(self._period):
            self.close(info)

    def close(self, info: StepInfo) -> None:
        """Closes the window at this step, unless it is empty."""
        if self._window.count:
            self._closed = (info.step, *self._window.close(), self._timed or 0)
            self._timed = 0

    def deliver(self, info: StepInfo) -> None:
        """Hands on what was closed; waits for the devices."""
        if self._closed is not None:
            step, sums, count, timed = self._closed
            self._closed = None
            means = self._window.means(sums, count, step)
            if timed:
                means["steps_per_second"] = timed / max(self.stopwatch.restart(), 1e-9)
                means["examples_per_second"] = means["steps_per_second"] * self._batch_size
            self._write(step, means)
            self._latest = means, step
            self._window.judge(sums, count, step)
        info.metrics, info.metrics_step = self._latest

    def settle(self, info: StepInfo) -> None:
        """Delivers, and waits for the devices: what comes next is not training.

        Raises NonFinite if a step so far ends the run: nothing may be made of its state.
        """
        self.deliver(info)
        self._window.wait(info.step)
