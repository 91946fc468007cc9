"""Checkpoints as several processes read them: process 0 first, and all of them the same."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from haikutrain import processes
from haikutrain.checkpoint import Checkpointer, Restored, find_checkpoint
from haikutrain.errors import (
    CheckpointDamaged,
    CheckpointMissing,
    CheckpointUnreadable,
    UsageError,
)

State = TypeVar("State")
T = TypeVar("T")

_SEARCH = "the newest good checkpoint"

# Seconds until a file that one machine has written must be seen by the others.
_DELAY = 60.0


class Reader(Protocol):
    """What a start needs of a `Checkpointer`."""

    @property
    def directory(self) -> pathlib.Path: ...
    def steps(self) -> list[int]: ...
    def latest_step(self) -> int | None: ...
    def best_step(self) -> int | None: ...
    def newest_good(self, read: Callable[[int], T]) -> T | None: ...
    def read_meta(self, step: int) -> dict[str, Any]: ...
    def read(self, step: int) -> Restored[Any]: ...
    def restore(
        self, step: int, target: State, *, fields: Sequence[str] | None = None
    ) -> Restored[State]: ...


def find_together(path: str) -> tuple[pathlib.Path, int | None]:
    """What `find_checkpoint` finds in process 0, in all processes."""

    def find() -> tuple[str, int | None]:
        directory, step = find_checkpoint(path)
        return str(directory), step

    directory, step = processes.from_main(f"looking for {path}", find)
    return pathlib.Path(directory), step


def restore_chosen(checkpointer: Reader, checkpoint: str | int, read: Callable[[int], T]) -> T:
    """What `read` makes of the checkpoint that "latest", "best" or a number names.

    "latest" is the newest that is not damaged, see `Checkpointer.newest_good`; any other that is
    damaged is an error.

    Raises:
      UsageError: there is no such checkpoint.
    """
    if checkpoint == "latest" and (result := checkpointer.newest_good(read)) is not None:
        return result
    steps = checkpointer.steps()
    if not steps:
        raise UsageError(f"there is no checkpoint in {checkpointer.directory}")
    if checkpoint == "best":
        best = checkpointer.best_step()
        if best is None:
            raise UsageError(
                f"no checkpoint in {checkpointer.directory} has a number for config.best_metric"
            )
        return read(best)
    if isinstance(checkpoint, str) and checkpoint.isdecimal():
        checkpoint = int(checkpoint)
    if checkpoint not in steps:
        raise UsageError(
            f"there is no checkpoint of step {checkpoint} in {checkpointer.directory}; there are "
            f"{', '.join(map(str, steps))}"
        )
    return read(int(checkpoint))


def together(checkpointer: Checkpointer) -> Reader:
    """The checkpointer itself for a process alone, else one that all processes call alike."""
    return checkpointer if processes.count() == 1 else _Together(checkpointer)


@dataclasses.dataclass
class _Together:
    """Every method is called by all processes, and gives all the same or fails in all.

    What is small comes from process 0. Arrays are read by each process, once process 0 has found
    them good.
    """

    own: Checkpointer

    @property
    def directory(self) -> pathlib.Path:
        return self.own.directory

    def steps(self) -> list[int]:
        return self._from_main("steps", self.own.steps)

    def latest_step(self) -> int | None:
        return self._from_main("latest step", self.own.latest_step)

    def best_step(self) -> int | None:
        return self._from_main("best step", self.own.best_step)

    def newest_good(self, read: Callable[[int], T]) -> T | None:
        return self._search(read) if processes.index() == 0 else self._follow(read)

    def _search(self, read: Callable[[int], T]) -> T | None:
        """Process 0 searches, and tells the others what it tries."""
        failed_together = False

        def attempt(step: int) -> T:
            nonlocal failed_together
            processes.gather(_SEARCH, {"try": step})
            try:
                return read(step)
            except (CheckpointDamaged, CheckpointMissing):
                raise
            except BaseException:
                failed_together = True
                raise

        def search() -> T | None:
            try:
                return self.own.newest_good(attempt)
            except CheckpointDamaged as error:
                if not failed_together:
                    processes.gather(_SEARCH, {"none": str(error)})
                raise

        found = search()
        processes.gather(_SEARCH, {"found": found is not None})
        return found

    def _follow(self, read: Callable[[int], T]) -> T | None:
        result: T | None = None
        while True:
            told: dict[str, Any] = processes.gather(_SEARCH, {})[0]
            if "none" in told:
                raise CheckpointDamaged(told["none"])
            if "found" in told:
                return result
            with contextlib.suppress(CheckpointDamaged, CheckpointMissing):
                result = read(told["try"])

    def read_meta(self, step: int) -> dict[str, Any]:
        return self._from_main(f"metadata of {step}", lambda: self.own.read_meta(step))

    def read(self, step: int) -> Restored[Any]:
        return self._read(step, lambda: self.own.read(step))

    def restore(
        self, step: int, target: State, *, fields: Sequence[str] | None = None
    ) -> Restored[State]:
        return self._read(step, lambda: self.own.restore(step, target, fields=fields))

    def _from_main(self, what: str, function: Callable[[], T]) -> T:
        return processes.from_main(f"{what} in {self.directory}", function)

    def _read(self, step: int, function: Callable[[], T]) -> T:
        results: list[T] = []
        self._from_main(f"checkpoint {step}", lambda: results.append(function()))
        return results[0] if results else self._read_late(step, function)

    def _read_late(self, step: int, function: Callable[[], T]) -> T:
        """Reads from a file system that may show late what another machine has written."""
        deadline = time.monotonic() + _DELAY
        while True:
            try:
                return function()
            except (CheckpointDamaged, CheckpointMissing, CheckpointUnreadable) as error:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"process 0 has read checkpoint {step} in {self.directory}, and process "
                        f"{processes.index()} cannot ({error}); put the workdir on a file system "
                        "that all processes share"
                    ) from error
            time.sleep(0.2)
