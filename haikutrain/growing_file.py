"""Files on disks that may be full: they grow by whole pieces, or are replaced as a whole."""

import collections
import contextlib
import os
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging


class Backlog:
    """Pieces of work in order: what fails with an OSError stays, and is tried again."""

    def __init__(self, name: str, do: Callable[[Any], None]):
        self._name = name
        self._do = do
        self._waiting: collections.deque[Any] = collections.deque()

    def add(self, piece: Any) -> None:
        """Does it now, or says once that it cannot be done and keeps it."""
        behind = bool(self._waiting)
        self._waiting.append(piece)
        try:
            self.clear()
        except OSError as error:
            if not behind:
                logging.warning(
                    "%s cannot be written: %s; kept in memory, to be tried again",
                    self._name,
                    error.strerror,
                )

    def put_back(self, pieces: Sequence[Any]) -> None:
        """Takes pieces that were done and are undone, to be done before all others."""
        self._waiting.extendleft(reversed(pieces))

    def clear(self) -> None:
        """Does all that is left; raises the OSError of what cannot be done."""
        while self._waiting:
            self._do(self._waiting[0])
            self._waiting.popleft()


class GrowingFile:
    """A file that grows by whole pieces, one at a time and in order.

    What cannot be written is kept, and tried again by whatever is called next. One thread writes;
    another may call `sync`.

    Args:
      path: absolute; its directory exists.
      mode: as of `open`: "ab" to add to what is there, "xb" for a new file.

    Raises:
      OSError: the file cannot be opened.
    """

    def __init__(self, path: pathlib.Path, mode: str):
        # Unbuffered: what does not reach the system is ours to keep.
        self._file = open(path, mode, buffering=0)  # noqa: SIM115
        self._backlog = Backlog(str(path), self._write_whole)
        # A network file system may tell at `fsync` only that what was written is lost.
        self._lock = threading.Lock()
        self._safe_size = os.fstat(self._file.fileno()).st_size
        self._since: list[bytes] = []
        self._lost = False
        # A new name is on disk only once its directory is.
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def flush(self) -> None:
        """Hands all that was written to the system; raises OSError if it does not take it."""
        self._write_again()
        self._backlog.clear()

    def sync(self) -> None:
        """Returns when all that was flushed is on disk; OSError if it cannot be."""
        with self._lock:
            pieces, size = len(self._since), os.fstat(self._file.fileno()).st_size
        try:
            os.fsync(self._file.fileno())
        except OSError:
            self._lost = True
            raise
        with self._lock:
            del self._since[:pieces]
            self._safe_size = size

    def close(self) -> None:
        """Flushes, syncs and frees, also if one of them raises; closing twice is fine."""
        if not self._file.closed:
            try:
                self.flush()
                self.sync()
            finally:
                self._file.close()

    def append(self, piece: bytes) -> None:
        """Writes a piece, now or when there is room for it."""
        self._write_again()
        self._backlog.add(piece)

    def _write_again(self) -> None:
        """After a sync that failed: all that may be lost is to be written once more."""
        if self._lost:
            self._cut(self._safe_size)
            self._backlog.put_back(self._since)
            self._since, self._lost = [], False

    def _write_whole(self, piece: bytes) -> None:
        file = self._file.fileno()
        with self._lock:
            before = os.fstat(file).st_size
            try:
                left = memoryview(piece)
                while left:
                    left = left[os.write(file, left) :]
            except OSError:
                self._cut(before)  # A reader never meets half a piece.
                raise
            self._since.append(piece)

    def _cut(self, size: int) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fileno(), size)
            os.lseek(self._file.fileno(), size, os.SEEK_SET)


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Makes `content` what is in the file; a crash or a full disk leaves the old one whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
