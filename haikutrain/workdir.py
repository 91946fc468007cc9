"""The folder of a run: whose it is, and where things are in it."""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from haikutrain import os_errors
from haikutrain.errors import UsageError


def experiment_name(kind: type) -> str:
    """How a run names its experiment: `file:Class`, or `:Class` for one defined in a notebook."""
    module = kind.__module__.replace(":", ".").rpartition(".")[2]
    return f"{'' if module in ('__main__', 'builtins') else module}:{kind.__qualname__}"


def same_experiment(a: str, b: str) -> bool:
    """Whether two names may be of one experiment: a notebook may go on with a file's run."""
    (module_a, _, class_a), (module_b, _, class_b) = a.partition(":"), b.partition(":")
    return class_a == class_b and (module_a == module_b or "" in (module_a, module_b))


def check_file(path: str | os.PathLike[str]) -> None:
    """Raises UsageError if predictions cannot be written to a file of this name."""
    target = pathlib.Path(path)
    if not str(path) or not target.name or target.is_dir() or not target.absolute().parent.is_dir():
        raise UsageError(
            f"predictions cannot be written to {str(path)!r}: give a file's name in a folder that "
            "exists"
        )


def write_rows(path: str | os.PathLike[str], splits: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes an npz file with an array `<split>/<name>` for each; all of it or nothing."""
    arrays = {f"{split}/{name}": a for split, rows in splits.items() for name, a in rows.items()}
    target = pathlib.Path(path)
    new = target.with_name(f"{target.name}.tmp")
    try:
        with new.open("wb") as file:
            np.savez(file, **arrays)
        new.replace(target)
    except OSError as error:
        raise UsageError(f"predictions cannot be written to {path}: {error.strerror}") from error
    finally:
        new.unlink(missing_ok=True)


class Workdir:
    """Paths of a run's folder. Nothing is created before `claim`.

    Args:
      path: of the folder.

    Raises:
      UsageError: the path is a file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path).absolute()
        # `Path.exists` raises where a folder above may not be entered.
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise UsageError(f"workdir {path} is a file; name a folder with --workdir")
        self._lock: int | None = None
        self.config = self.path / "config.json"
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.metrics_eval = self.path / "metrics_eval.jsonl"
        self.media = self.path / "media"
        self.tensorboard = self.path / "tensorboard"

    def check_owner(self, experiment: str) -> None:
        """Raises UsageError if another experiment's run is here."""
        owner = self._read("experiment")
        if owner is None:
            return
        if not same_experiment(owner, experiment):
            raise UsageError(
                f"workdir {self.path} holds a run of {owner}, and this is {experiment}; give "
                "another --workdir"
            )

    def check_writable(self) -> None:
        """Raises UsageError if the folder can be neither written nor created."""
        parent = next(p for p in (self.path, *self.path.parents) if os.path.exists(p))
        try:
            with contextlib.suppress(FileNotFoundError):
                os.stat(self.path)  # Raises for a name that is too long.
            with tempfile.TemporaryFile(dir=parent):
                pass
        except OSError as error:
            raise UsageError(
                f"workdir {self.path} cannot be written ({error.strerror}: {parent}); give another "
                "--workdir"
            ) from error

    def lock(self, name: str = ".lock") -> None:
        """Keeps other trainers out, if the folder exists; again and again is fine.

        The lock is on a file, which names its holder, and ends with the process, however that dies.

        Args:
          name: of the file; each kind of job has its own.

        Raises:
          UsageError: another process has it; names that.
        """
        if self._lock is not None or not self.path.exists():
            return
        with self.writing():
            lock = os.open(self.path / name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(lock, 1000).decode(errors="replace")
            os.close(lock)
            raise UsageError(
                f"workdir {self.path} is in use by {holder or 'another process'}; wait until it "
                "ends, or give another --workdir"
            ) from error
        except OSError as error:
            # Some network file systems have no locks.
            logging.warning(
                "%s cannot be locked (%s): start nothing else there", self.path, error.strerror
            )
        with contextlib.suppress(OSError):  # On a full disk it is an anonymous lock.
            os.ftruncate(lock, 0)
            os.pwrite(lock, _this_process().encode(), 0)
        self._lock = lock

    def close(self) -> None:
        """Lets other trainers in."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def _read(self, name: str) -> Any:
        try:
            return json.loads(self.config.read_text())[name]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Makes a UsageError of whatever cannot be written in here."""
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"workdir {self.path} cannot be written ({os_errors.reason(error)}); make it "
                "writable, or give another --workdir"
            ) from error

    def claim(self, experiment: str, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
        """Creates the folder, keeps others out of it, and writes down what runs there."""
        content = {
            "experiment": experiment,
            "config": config,
            "overrides": list(overrides),
            "started_by": _this_process(),
        }
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            new = self.config.with_suffix(".tmp")
            try:
                new.write_text(json.dumps(content, indent=2) + "\n")
                new.replace(self.config)
            finally:
                new.unlink(missing_ok=True)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
