"""The console: lines for people, and a progress bar where there is a terminal."""

import collections
import datetime
import io
import math
import sys
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

import absl.logging


class _Nowhere(io.StringIO):
    def write(self, text: str) -> int:
        return len(text)


class Console:
    """Lines for people, and a progress bar where the stream is a terminal.

        step  50/500  train  loss 0.3214  accuracy 0.9123  1234 steps/s

    While the bar moves, lines and absl's log appear above it; `close` ends it.

    Args:
      num_steps: where the run ends.
      stream: by default `sys.stderr`.
    """

    def __init__(self, num_steps: int, stream: IO[str] | None = None):
        self._num_steps = num_steps
        # A daemon may have closed it; then it is None.
        self._stream: IO[str] = stream or sys.stderr or _Nowhere()
        self._widths: dict[tuple[str, str], int] = {}
        self._split_width = 0
        self._bar = _Bar(num_steps, self._stream) if self._stream.isatty() else None

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        loss = scalars.get("loss") if split == "train" else None
        self._say(self._line(step, split, scalars), loss)

    def _say(self, line: str, loss: float | None = None) -> None:
        if self._bar is None:
            self._stream.write(line + "\n")
            self._stream.flush()
        else:
            self._bar.write(line, loss)

    def write_media(self, step: int, split: str, media: Mapping[str, Any]) -> None:
        for name, value in media.items():
            if isinstance(value, str):
                self._say(f"step {step}  {split}  {name}: {value}")

    def progress(self, step: int) -> None:
        """Says that `step` steps are done. Meant to be called every step: it draws seldom."""
        if self._bar is not None:
            self._bar.progress(step)

    def flush(self) -> None:
        self._stream.flush()

    def sync(self) -> None:
        """Nothing is on disk."""

    def close(self) -> None:
        bar, self._bar = self._bar, None  # What is still written is plain lines.
        if bar is not None:
            bar.close()

    def _line(self, step: int, split: str, scalars: Mapping[str, float]) -> str:
        num_steps = str(self._num_steps)
        self._split_width = max(self._split_width, len(split))
        parts = [f"step {step:>{len(num_steps)}}/{num_steps}", f"{split:<{self._split_width}}"]
        for name, text in _columns(scalars):
            width = max(len(text), self._widths.get((split, name), 0))
            self._widths[split, name] = width
            parts.append(text.ljust(width))
        return "  ".join(parts).rstrip()


def _columns(scalars: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Name and text of each: the loss first, the speeds last."""
    speeds = {"steps_per_second": "steps/s", "examples_per_second": "examples/s"}
    if "loss" in scalars:
        yield "loss", f"loss {_number(scalars['loss'])}"
    for name, value in scalars.items():
        if name != "loss" and name not in speeds:
            yield name, f"{name} {_number(value)}"
    for name, unit in speeds.items():
        if name in scalars:
            yield name, f"{_number(scalars[name])} {unit}"


def _number(value: float) -> str:
    """Four significant digits, whole from 1000 on, scientific where that would be long."""
    if isinstance(value, int) or 999.95 <= abs(value) < 999999.5:
        return f"{value:.0f}"
    digits, e, exponent = f"{value:#.4g}".partition("e")
    return f"{digits}e{int(exponent)}" if e else digits


class _Bar:
    """rich's progress bar. It starts with the first call, and draws at most 10 times a second."""

    def __init__(self, num_steps: int, stream: IO[str]):
        import rich.console
        import rich.progress

        columns = [rich.progress.BarColumn(30), rich.progress.TextColumn("{task.fields[text]}")]
        self._rich = rich.progress.Progress(
            *columns,
            console=rich.console.Console(file=stream, highlight=False),
            auto_refresh=False,  # No thread: only the training loop draws.
            redirect_stdout=sys.stdout.isatty(),  # What goes to a file stays out of the terminal.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._rich.add_task("", total=num_steps, text="")
        self._num_steps = num_steps
        self._step = 0
        self._loss = ""
        self._drawn = -math.inf
        self._marks: collections.deque[tuple[float, int]] = collections.deque(maxlen=50)
        self._log_stream: IO[str] | None = None

    def progress(self, step: int) -> None:
        self._step = step
        now = time.monotonic()
        if now - self._drawn >= 0.1:
            self._draw(now)

    def write(self, line: str, loss: float | None) -> None:
        self._start()
        if loss is not None:
            self._loss = f"loss {_number(loss)}"
        self._rich.console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._log_stream is not None:
            try:
                self._draw(time.monotonic())
                self._rich.stop()
            finally:
                absl.logging.get_absl_handler().python_handler.stream = self._log_stream

    def _start(self) -> None:
        if self._log_stream is None:
            handler = absl.logging.get_absl_handler().python_handler
            self._log_stream = handler.stream
            on_terminal = handler.stream in (sys.stderr, sys.__stderr__)
            self._rich.start()
            if on_terminal:
                handler.stream = sys.stderr  # Now rich's proxy, which prints above the bar.

    def _draw(self, now: float) -> None:
        self._start()
        self._drawn = now
        self._marks.append((now, self._step))
        parts = [f"{self._step}/{self._num_steps}", self._speed(), self._loss]
        self._rich.update(self._task, completed=self._step, text="  ".join(filter(None, parts)))
        self._rich.refresh()

    def _speed(self) -> str:
        (then, step), (now, _) = self._marks[0], self._marks[-1]
        if self._step <= step or now <= then:
            return ""
        rate = (self._step - step) / (now - then)
        left = datetime.timedelta(seconds=round((self._num_steps - self._step) / rate))
        return f"{_number(rate)} steps/s" + (f"  {left} left" if left else "")
