"""Checkpoints as several processes read them: process 0 first, and all of them the same."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from haikutrain import processes
from haikutrain.checkpoint import Checkpointer, Restored
from haikutrain.checkpoint_folder import list_steps
from haikutrain.errors import UsageError

State = TypeVar("State")
Value = TypeVar("Value")

# Seconds until a file that one machine has written must be seen by the others.
_DELAY = 60.0


class Reader(Protocol):
    """What a start needs of a `Checkpointer`."""

    @property
    def directory(self) -> pathlib.Path: ...
    def steps(self) -> list[int]: ...
    def latest_step(self) -> int | None: ...
    def best_step(self) -> int | None: ...
    def read_meta(self, step: int) -> dict[str, Any]: ...
    def read(self, step: int) -> Restored[Any]: ...
    def restore(
        self, step: int, target: State, *, fields: Sequence[str] | None = None
    ) -> Restored[State]: ...


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

    def read_meta(self, step: int) -> dict[str, Any]:
        return self._from_main(f"metadata of {step}", lambda: self.own.read_meta(step))

    def read(self, step: int) -> Restored[Any]:
        return self._read(step, lambda: self.own.read(step))

    def restore(
        self, step: int, target: State, *, fields: Sequence[str] | None = None
    ) -> Restored[State]:
        return self._read(step, lambda: self.own.restore(step, target, fields=fields))

    def _from_main(self, what: str, function: Callable[[], Value]) -> Value:
        return processes.from_main(f"{what} in {self.directory}", function)

    def _read(self, step: int, function: Callable[[], Value]) -> Value:
        results: list[Value] = []
        self._from_main(f"checkpoint {step}", lambda: results.append(function()))
        if not results:
            self._wait_for(step)
            results.append(function())
        return results[0]

    def _wait_for(self, step: int) -> None:
        """Waits for a file system that shows late what another machine has written."""
        deadline = time.monotonic() + _DELAY
        while step not in list_steps(self.directory):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"process 0 has checkpoint {step} in {self.directory}, and process "
                    f"{processes.index()} does not see it; put the workdir on a file system that "
                    "all processes share"
                )
            time.sleep(0.1)
