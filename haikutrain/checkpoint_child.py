"""The process that writes checkpoints, as it is told through a socket by the one that trains."""

import contextlib
import dataclasses
import functools
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

from haikutrain import channel, leaves, os_errors
from haikutrain.checkpoint_store import Store, warm_up
from haikutrain.shared_memory import SharedMemory


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an array lies: in which memory, at which offset."""

    memory: str
    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Failure:
    """What went wrong in the other process."""

    number: int | None
    reason: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        trace = "".join(traceback.format_exception(error))
        return cls(os_errors.number(error), os_errors.reason(error), trace)

    def exception(self) -> Exception:
        error: Exception = RuntimeError(self.reason)
        if self.number is not None:
            error = OSError(self.number, os.strerror(self.number))
        error.add_note(f"In the process that writes checkpoints:\n{self.trace}")
        return error


def serve(connection: socket.socket) -> None:
    """Does what it is told, until the other side closes the connection."""
    store: Store | None = None
    memories: dict[str, SharedMemory] = {}
    while True:
        (kind, *rest), files = channel.receive(connection)
        if kind == "open":
            directory, retention = rest
            store = Store(directory, functools.partial(retention.expired, directory))
        elif kind == "close":
            if store is not None:
                store.close()
            store, memories = None, {}
        else:
            sizes, *what = rest
            for (name, size), file in zip(sizes.items(), files, strict=True):
                memories[name] = SharedMemory(size, file)
            assert store is not None
            failed = _written(connection, store, memories, *what)
            channel.send(connection, failed)
            while failed is not None:
                # The other side may still have something to say, and then ends this process.
                channel.receive(connection)


def _written(
    connection: socket.socket,
    store: Store,
    memories: Mapping[str, SharedMemory],
    step: int,
    table: Mapping[leaves.Keys, leaves.Leaf],
    places: Mapping[leaves.Keys, Place],
    texts: Mapping[str, Any],
) -> Failure | None:
    """Writes one checkpoint; says why if that failed."""
    arrays = {
        keys: memories[at.memory].array(at.shape, leaves.numpy_dtype(at.dtype), at.offset)
        for keys, at in places.items()
    }

    def checksums() -> Any:
        return channel.receive(connection)[0]

    try:
        store.write(step, table, arrays, {**texts, "checksums": checksums})
    except Exception as error:
        return Failure.of(error)
    return None


def give_way() -> None:
    """Lowers the priority of this thread, and of those that it starts: training goes first."""
    # A thread's own on Linux; elsewhere it would be the process's.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def main(file: int) -> None:
    """The process; `file` is its socket."""
    logging.disable(logging.ERROR)  # What failed is said by who waits for it.
    warm_up()
    give_way()
    with contextlib.suppress(EOFError, ConnectionError):
        serve(socket.socket(fileno=file))
