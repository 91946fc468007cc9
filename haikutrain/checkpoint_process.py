"""A process of its own that writes checkpoints: Orbax's Python takes no turn of the training loop.

`Writer` is the training process's side, `serve` the other's. What they say to each other goes
through a pair of sockets, arrays through shared memory. A checkpoint is committed only on the
training process's last word, which it gives when it has judged and summed what is being written.
"""

import contextlib
import fcntl
import os
import pathlib
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from haikutrain import channel, leaves
from haikutrain.checkpoint_child import Failure, Place
from haikutrain.checkpoint_retention import Retention, remove_leftovers
from haikutrain.shared_memory import SharedMemory, Spec

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


class WriterDied(RuntimeError):
    """The process that writes checkpoints has ended before it was done."""


class Writer:
    """Writes checkpoints in another process, which starts when it is needed and again if it dies.

    Not for several threads at once, but for `start` and `buffers`, while nothing is written.

    Args:
      directory: of the checkpoints; absolute, and there.
      retention: which of them to keep.
    """

    def __init__(self, directory: pathlib.Path, retention: Retention):
        self._directory = directory
        self._retention = retention
        self._memories: dict[str, SharedMemory] = {}
        self._sent: dict[str, SharedMemory] = {}
        self._child: _Child | None = None

    def start(self) -> None:
        """Starts the process, if it does not run: it takes a second until it can write.

        On Linux it ends with the thread that calls this.
        """
        if self._child is not None and self._child.runs():
            return
        self._sent = {}
        opening = "open", self._directory, self._retention
        self._child = _Child.take()
        try:
            self._child.send(opening)
        except WriterDied:  # Just now, and it had done nothing.
            self._child = _Child()
            self._child.send(opening)

    def buffers(self, specs: Sequence[Spec]) -> list[np.ndarray]:
        """Arrays that the process sees too: what lies in them is not copied to be written.

        Those of an earlier call are not to be used any more.
        """
        return self._memory("state", specs).arrays(specs)

    def write(
        self,
        step: int,
        table: Mapping[leaves.Keys, leaves.Leaf],
        arrays: Mapping[leaves.Keys, np.ndarray],
        texts: Mapping[str, Any],
        checksums: Callable[[], Any],
    ) -> None:
        """Commits a checkpoint, all of it or nothing, and deletes those that it makes expire.

        Args:
          step: its name.
          table: what each leaf is.
          arrays: their values.
          texts: the JSON items, but for `checksums`.
          checksums: returns that item; called while the arrays are being written. What it raises
            is raised here, and nothing is committed.

        Raises:
          OSError: the system's reason why it could not be written.
          RuntimeError: any other.
          WriterDied: the process ended, and the one that took its place as well.
        """
        places = self._places({keys: array for keys, array in arrays.items() if array.size})
        try:
            self._write(step, table, places, texts, checksums)
        except WriterDied:
            self._write(step, table, places, texts, checksums)

    def forget(self) -> None:
        """To be called when anything but `write` has changed which checkpoints there are."""
        if self._child is not None:
            with contextlib.suppress(WriterDied):
                self._child.send(("open", self._directory, self._retention))

    def close(self) -> None:
        """Frees what it holds; the process stays for the next Writer."""
        child, self._child = self._child, None
        self._memories, self._sent = {}, {}
        if child is None:
            return
        with contextlib.suppress(WriterDied):
            child.send(("close",))
            child.give_back()

    def _write(
        self,
        step: int,
        table: Mapping[leaves.Keys, leaves.Leaf],
        places: Mapping[leaves.Keys, Place],
        texts: Mapping[str, Any],
        checksums: Callable[[], Any],
    ) -> None:
        self.start()
        assert self._child is not None
        new = {
            name: memory
            for name, memory in self._memories.items()
            if self._sent.get(name) is not memory
        }
        sizes = {name: memory.size for name, memory in new.items()}
        files = [memory.file for memory in new.values()]
        try:
            self._child.send(("write", sizes, step, table, places, texts), files)
            self._sent = {**self._memories}
            self._child.send(checksums())
            failed = self._child.answer()
            if failed is not None:
                raise failed.exception()
        except BaseException:
            # Threads of Orbax go on writing what has failed.
            self._child.end()
            remove_leftovers(self._directory)
            raise

    def _places(self, arrays: Mapping[leaves.Keys, np.ndarray]) -> dict[leaves.Keys, Place]:
        """Where arrays lie; those that the process does not see are copied to where it does."""
        found = {}
        state = self._memories.get("state")
        for keys, array in arrays.items():
            offset = None if state is None else state.offset(array)
            if offset is not None:
                found[keys] = Place("state", offset, array.shape, array.dtype.name)
        others = {keys: array for keys, array in arrays.items() if keys not in found}
        specs = [(array.shape, array.dtype) for array in others.values()]
        memory = self._memory("others", specs)
        for (keys, array), copy in zip(others.items(), memory.arrays(specs), strict=True):
            np.copyto(copy, array)
            offset = memory.offset(copy)
            assert offset is not None
            found[keys] = Place("others", offset, copy.shape, copy.dtype.name)
        return found

    def _memory(self, name: str, specs: Sequence[Spec]) -> SharedMemory:
        size = SharedMemory.size_of(specs)
        memory = self._memories.get(name)
        if memory is None or memory.size < size:
            memory = self._memories[name] = SharedMemory(size)
        return memory


class _Child:
    """The process, seen from the training process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        # Below 3, if the training process has closed its own, these are the child's streams.
        file = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)
        paths = [os.path.abspath(path) for path in sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        # Whatever the training process computes on is its own; and so is its cache.
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        # First of all, for the imports take a second.
        code = f"from haikutrain import signals; signals.end_with({os.getpid()})\n"
        code += f"from haikutrain import checkpoint_child; checkpoint_child.main({file})"
        try:
            # They are meant for the training process, which decides what is still saved.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                pass_fds=[file],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            os.close(file)
        self.end = weakref.finalize(self, _end, self._process, self._socket, os.getpid())

    @classmethod
    def take(cls) -> "_Child":
        """The one that does nothing, or a new one."""
        with contextlib.suppress(IndexError):
            while True:
                child = _idle.pop()  # In one go, for another thread may want it.
                if child.runs():
                    return child
        return cls()

    def give_back(self) -> None:
        """Keeps it for another Writer; one is enough."""
        _idle[:] = [self]

    def runs(self) -> bool:
        return self.end.alive and self._process.poll() is None

    def send(self, message: Any, files: Sequence[int] = ()) -> None:
        try:
            channel.send(self._socket, message, files)
        except OSError:
            raise self._died() from None

    def answer(self) -> Failure | None:
        try:
            return channel.receive(self._socket)[0]
        except (OSError, EOFError):
            raise self._died() from None

    def _died(self) -> WriterDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)  # It may close its socket before it has ended.
        self.end()
        code = self._process.returncode
        how = f"ended with code {code}"
        if code < 0:
            how = f"was killed ({signal.Signals(-code).name}; was there enough memory?)"
        return WriterDied(f"the process that writes checkpoints {how}")


_idle: list[_Child] = []
"""At most one; it ends when nothing refers to it any more."""


def _end(process: subprocess.Popen, connection: socket.socket, owner: int) -> None:
    connection.close()
    if os.getpid() == owner:  # And not a fork of it.
        process.kill()
        process.wait()
