"""Where scalars go: the console, a file of JSON lines, TensorBoard, several at once.

A writer gets Python numbers only, on one process only. The files can be resumed: opened with the
step of the checkpoint that training goes on from, they lose what was written after it, so that
each step of each split stands in them once, whatever was killed and resumed.
"""

import collections
import datetime
import json
import math
import os
import pathlib
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Protocol

import absl.logging

from haikutrain.errors import UsageError


class MetricWriter(Protocol):
    """A place for scalars."""

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        """Takes the scalars of one split ("train", or an evaluation split) at one step."""

    def flush(self) -> None:
        """Returns when all that was written is on disk."""

    def close(self) -> None:
        """Flushes and frees; closing twice is fine."""


class Writers:
    """Several writers as one.

    An error in one keeps nothing from the others: each call reaches all of them, then the first
    error is raised, with the further ones as its notes.
    """

    def __init__(self, writers: Sequence[MetricWriter]):
        self._writers = list(writers)

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        self._each(lambda writer: writer.write(step, split, scalars))

    def flush(self) -> None:
        self._each(lambda writer: writer.flush())

    def close(self) -> None:
        self._each(lambda writer: writer.close())

    def _each(self, call: Callable[[MetricWriter], None]) -> None:
        first: BaseException | None = None
        for writer in self._writers:
            try:
                call(writer)
            except BaseException as error:
                if first is None:
                    first = error
                else:
                    first.add_note(f"and in {type(writer).__name__}: {error!r}")
        if first is not None:
            raise first


class _FileWriter(MetricWriter):
    """A file that grows by whole pieces.

    What a full disk refuses stays in the buffer, so that a later piece cannot land behind half of
    an earlier one.
    """

    def __init__(self, path: pathlib.Path, mode: str):
        self._file = open(path, mode)  # noqa: SIM115
        # A new name is on disk only once its directory is.
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _append(self, piece: bytes) -> None:
        self._file.write(piece)
        self._file.flush()


class JsonLines(_FileWriter):
    """One JSON object a line: `{"step": 50, "split": "train", "loss": 0.25}`.

    Non-finite numbers are `null`. A line is handed to the operating system as it is written, so
    that it outlives the process; `flush` makes it outlive the machine.

    Args:
      path: the file; its directory exists.
      resume_step: the step that training goes on from. Lines of later steps are dropped, and
        whatever is no such object (a line torn by a crash). None or 0 is a fresh run, which starts
        the file anew; `sys.maxsize` keeps every line. A crash meanwhile leaves the old file or the
        new one.

    Raises:
      OSError: if the file cannot be read or written; so does `write`.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None):
        path = pathlib.Path(path).absolute()
        if path.exists():
            _keep_lines(path, resume_step or -1)
        super().__init__(path, "ab")

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        """Appends a line; a scalar called `step` or `split` is a UsageError."""
        for name in scalars.keys() & {"step", "split"}:
            raise UsageError(f"metric {name!r}: the log itself needs that name; choose another")
        line: dict[str, Any] = {"step": step, "split": split}
        line.update((name, _finite(value)) for name, value in scalars.items())
        self._append(json.dumps(line, allow_nan=False).encode() + b"\n")


def _finite(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(value)


def _keep_lines(path: pathlib.Path, last_step: int) -> None:
    """Rewrites the file with its lines up to `last_step` only."""

    def good(line: bytes) -> bool:
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError):
            return False
        return isinstance(step, int) and step <= last_step

    temporary = path.with_name(path.name + ".tmp")
    with open(path, "rb") as old, open(temporary, "wb") as new:
        # A whole object whose line end alone was lost is kept: its step will not come again.
        new.writelines(line.rstrip(b"\n") + b"\n" for line in old if good(line))
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, path)


class TensorBoard(_FileWriter):
    """TensorBoard event files; scalars are called `split/name`.

    Each start writes a file of its own, which tells TensorBoard to forget what earlier files hold
    of the steps that come again. All scalars of a call travel in one event. Like `JsonLines`, it
    loses nothing with the process, and after `flush` nothing with the machine.

    Args:
      directory: made if missing.
      resume_step: the step that training goes on from: TensorBoard forgets later ones. None or 0 is
        a fresh run: it forgets all.

    Raises:
      OSError: if the directory or the file cannot be written; so does `write`.
    """

    def __init__(self, directory: str | os.PathLike[str], resume_step: int | None = None):
        # The parts alone: tensorboardX's writer queues events for a thread that its flush() does
        # not wait for, and two of them started in the same second write to the same file.
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._summary, self._crc = event_pb2.Event, summary_pb2.Summary, masked_crc32c
        directory = pathlib.Path(directory).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(_next_event_file(directory), "xb")
        self._add(file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step=resume_step + 1 if resume_step else 0, session_log=start)

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        value = self._summary.Value
        values = [value(tag=f"{split}/{k}", simple_value=float(v)) for k, v in scalars.items()]
        self._add(step=step, summary=self._summary(value=values))

    def _add(self, **fields: Any) -> None:
        event = self._event(wall_time=time.time(), **fields).SerializeToString()
        # TFRecord: the length, its checksum, the bytes, their checksum.
        length = struct.pack("<Q", len(event))
        crc, event_crc = (struct.pack("<I", self._crc(part)) for part in (length, event))
        self._append(length + crc + event + event_crc)


def _next_event_file(directory: pathlib.Path) -> pathlib.Path:
    """A name that sorts behind those there: TensorBoard reads files in the order of their names."""
    names = (re.match(r"events\.out\.tfevents\.(\d{10})\.", p.name) for p in directory.iterdir())
    taken = max((int(name[1]) for name in names if name), default=0)
    second = max(int(time.time()), taken + 1)
    return directory / f"events.out.tfevents.{second:010d}.{socket.gethostname()}"


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
        self._stream = sys.stderr if stream is None else stream
        self._widths: dict[tuple[str, str], int] = {}
        self._split_width = 0
        self._bar = _Bar(num_steps, self._stream) if self._stream.isatty() else None

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        line = self._line(step, split, scalars)
        if self._bar is None:
            self._stream.write(line + "\n")
            self._stream.flush()
        else:
            self._bar.write(line, scalars.get("loss") if split == "train" else None)

    def progress(self, step: int) -> None:
        """Says that `step` steps are done. Meant to be called every step: it draws seldom."""
        if self._bar is not None:
            self._bar.progress(step)

    def flush(self) -> None:
        self._stream.flush()

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
