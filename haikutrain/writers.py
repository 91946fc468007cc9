"""Where scalars, pictures and texts go: a file of JSON lines, TensorBoard, several at once.

A writer gets Python numbers only, on one process only. The files can be resumed: opened with the
step of the checkpoint that training goes on from, they lose what was written after it, so that
each step of each split stands in them once, whatever was killed and resumed. What a full disk
refuses they keep in memory and try to write again; only `flush` and `close` raise for it.
"""

import io
import json
import math
import os
import pathlib
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from haikutrain import pictures
from haikutrain.errors import UsageError
from haikutrain.growing_file import Backlog, GrowingFile, replace_file

Media = np.ndarray | str
"""A picture or a text."""


class MetricWriter(Protocol):
    """A place for scalars, pictures and texts."""

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        """Takes the scalars of one split ("train", or an evaluation split) at one step."""

    def write_media(self, step: int, split: str, media: Mapping[str, Media]) -> None:
        """Takes pictures (see `haikutrain.pictures.encode`) and texts; may leave them out."""
        return

    def flush(self) -> None:
        """Hands all that was written to the system; raises OSError if it does not take it."""

    def sync(self) -> None:
        """Returns when all that was flushed is on disk; another thread may call it."""
        return

    def close(self) -> None:
        """Flushes and frees, also if flushing raises; closing twice is fine."""


class Writers:
    """Several writers as one.

    An error in one keeps nothing from the others: each call reaches all of them, then the first
    error is raised, with the further ones as its notes.
    """

    def __init__(self, writers: Sequence[MetricWriter]):
        self._writers = list(writers)

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        self._each(lambda writer: writer.write(step, split, scalars))

    def write_media(self, step: int, split: str, media: Mapping[str, Media]) -> None:
        self._each(lambda writer: writer.write_media(step, split, media))

    def flush(self) -> None:
        self._each(lambda writer: writer.flush())

    def sync(self) -> None:
        self._each(lambda writer: writer.sync())

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


class JsonLines(GrowingFile, MetricWriter):
    """One JSON object a line: `{"step": 50, "split": "train", "loss": 0.25}`.

    Non-finite numbers are `null`. A line is handed to the operating system as it is written, so
    that it outlives the process; `sync` makes it outlive the machine.

    Args:
      path: the file; its directory exists.
      resume_step: the step that training goes on from. Lines of later steps are dropped, and
        whatever is no such object (a line torn by a crash). None or 0 is a fresh run, which starts
        the file anew; `sys.maxsize` keeps every line. A crash meanwhile leaves the old file or the
        new one.

    Raises:
      OSError: if the file cannot be read or written.
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
        self.append(json.dumps(line, allow_nan=False).encode() + b"\n")


def _finite(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(value)


def _keep_lines(path: pathlib.Path, last_step: int) -> None:
    """Leaves only its lines up to `last_step` in the file, which becomes another if it changes."""

    def good(line: bytes) -> bool:
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError):
            return False
        return isinstance(step, int) and step <= last_step

    old = path.read_bytes()
    # A whole object whose line end alone was lost is kept: its step will not come again.
    new = b"".join(line.rstrip(b"\n") + b"\n" for line in io.BytesIO(old) if good(line))
    # Else it stays the file that another process may be appending to.
    if new != old:
        replace_file(path, new)


class MediaFiles(MetricWriter):
    """Pictures and texts as files: `<directory>/<split>-<name>-<step>.png` or `.txt`."""

    def __init__(self, directory: str | os.PathLike[str]):
        self._directory = pathlib.Path(directory)
        self._backlog = Backlog(str(directory), self._write_file)

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        pass  # Scalars go elsewhere.

    def write_media(self, step: int, split: str, media: Mapping[str, Media]) -> None:
        for name, value in media.items():
            stem = f"{split}-{name}-{step}".replace("/", "-")
            if isinstance(value, str):
                self._backlog.add((f"{stem}.txt", value.encode()))
            else:
                self._backlog.add((f"{stem}.png", pictures.encode(value)))

    def flush(self) -> None:
        self._backlog.clear()

    def close(self) -> None:
        self.flush()

    def _write_file(self, file: tuple[str, bytes]) -> None:
        name, content = file
        self._directory.mkdir(parents=True, exist_ok=True)
        replace_file(self._directory / name, content)


class TensorBoard(GrowingFile, MetricWriter):
    """TensorBoard event files; scalars are called `split/name`.

    Each start writes a file of its own, which tells TensorBoard to forget what earlier files hold
    of the steps that come again. All scalars of a call travel in one event. Like `JsonLines`, it
    loses nothing with the process, and after `sync` nothing with the machine.

    Args:
      directory: made if missing.
      resume_step: the step that training goes on from: TensorBoard forgets later ones. None or 0 is
        a fresh run: it forgets all.

    Raises:
      OSError: if the directory or the file cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str], resume_step: int | None = None):
        self._first_step = resume_step + 1 if resume_step else 0
        self._begun = False
        directory = pathlib.Path(directory).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(_next_event_file(directory), "xb")

    def _begin(self) -> None:
        """Writes what a file begins with, once; not when it is made, for an import takes time."""
        if self._begun:
            return
        self._begun = True
        # The parts alone: tensorboardX's writer queues events for a thread that its flush() does
        # not wait for, and two of them started in the same second write to the same file.
        from tensorboardX.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._summary, self._crc = event_pb2.Event, summary_pb2.Summary, masked_crc32c
        self._summary_pb2, self._tensor = summary_pb2, tensor_pb2.TensorProto
        self._add(file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step=self._first_step, session_log=start)

    def flush(self) -> None:
        self._begin()
        super().flush()

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        self._begin()
        value = self._summary.Value
        values = [value(tag=f"{split}/{k}", simple_value=float(v)) for k, v in scalars.items()]
        self._add(step=step, summary=self._summary(value=values))

    def write_media(self, step: int, split: str, media: Mapping[str, Media]) -> None:
        self._begin()
        values = [self._media(f"{split}/{name}", value) for name, value in media.items()]
        self._add(step=step, summary=self._summary(value=values))

    def _media(self, tag: str, value: Media) -> Any:
        if isinstance(value, str):
            # What TensorBoard's text plugin looks for.
            plugin = self._summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
            metadata = self._summary_pb2.SummaryMetadata(plugin_data=plugin)
            tensor = self._tensor(dtype="DT_STRING", string_val=[value.encode()])
            return self._summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        height, width = value.shape[:2]
        image = self._summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=pictures.encode(value)
        )
        return self._summary.Value(tag=tag, image=image)

    def _add(self, **fields: Any) -> None:
        event = self._event(wall_time=time.time(), **fields).SerializeToString()
        # TFRecord: the length, its checksum, the bytes, their checksum.
        length = struct.pack("<Q", len(event))
        crc, event_crc = (struct.pack("<I", self._crc(part)) for part in (length, event))
        self.append(length + crc + event + event_crc)


def _next_event_file(directory: pathlib.Path) -> pathlib.Path:
    """A name that sorts behind those there: TensorBoard reads files in the order of their names."""
    names = (re.match(r"events\.out\.tfevents\.(\d{10})\.", p.name) for p in directory.iterdir())
    taken = max((int(name[1]) for name in names if name), default=0)
    second = max(int(time.time()), taken + 1)
    return directory / f"events.out.tfevents.{second:010d}.{socket.gethostname()}"
