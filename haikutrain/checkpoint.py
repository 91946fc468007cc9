"""Checkpoints on disk: save, restore, keep, best, and what to do about damaged ones.

`<directory>/<step>/` holds one Orbax item per field of the state, NumPy arrays without a device
axis, and three JSON items: `meta` (what is known about the run), `data` (the position of the input)
and `checksums` (shape, dtype and CRC-32 of every leaf: Orbax's array data has no checksum).
"""

import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from absl import logging

from haikutrain import leaves
from haikutrain.checkpoint_child import give_way
from haikutrain.checkpoint_folder import (
    Folder,
    find_checkpoint,
    item_of,
    list_steps,
    make_checksums,
    make_items,
    named_steps,
    state_fields,
)
from haikutrain.checkpoint_process import Writer
from haikutrain.checkpoint_retention import Retention, other_folders, remove_leftovers, set_aside
from haikutrain.checkpoint_store import read_arrays
from haikutrain.errors import CheckpointDamaged, CheckpointMissing, UsageError
from haikutrain.leaves import digest
from haikutrain.positions import decode, encode
from haikutrain.shared_memory import Spec

__all__ = [
    "Checkpointer",
    "Restored",
    "decode",
    "digest",
    "encode",
    "find_checkpoint",
]

State = TypeVar("State")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Restored(Generic[State]):
    """What `Checkpointer.restore` returns."""

    state: State
    """Of the target's type: NumPy leaves with memory of their own, typed keys as typed keys."""
    meta: dict[str, Any]
    """What was given to `save`, and `step`, `format`, `empty`, `metrics`, `versions`."""
    data: Any
    """The input's position, equal in value and type to what was given to `save`."""


class Checkpointer:
    """One directory of checkpoints, `<directory>/<step>/`: the newest `keep`, and the best.

    Saving is asynchronous, one save at a time, by another process. Several processes: process 0
    alone writes (`save` does nothing in the others), each reads by itself. Call `close()` in a
    `finally`: leaving the process without it may lose the save in flight.

    Args:
      directory: made absolute at once. A writer creates it with the first save; if it is there, it
        first removes what a killed process left half written or half deleted.
      keep: how many of the newest checkpoints to keep.
      best_metric: a name in the `metrics` given to `save`; the checkpoint with the best value is
        kept too. Without a name there is no best checkpoint.
      best_mode: "max" or "min": which values are better. NaN is never best.
      read_only: nothing on disk is changed; `save` raises.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        keep: int = 3,
        best_metric: str | None = None,
        best_mode: str = "max",
        read_only: bool = False,
    ):
        if keep < 1:
            raise UsageError(f"{keep} checkpoints to keep: at least 1, the newest, must be kept")
        if best_mode not in ("max", "min"):
            raise UsageError(f'best_mode is {best_mode!r}; it must be "max" or "min"')
        self.directory = pathlib.Path(directory).absolute()
        # Orbax looks for what it wrote by a pattern; here it would find nothing, and say nothing.
        if not read_only and any(sign in str(self.directory) for sign in "*?["):
            raise UsageError(
                f"cannot write checkpoints to {self.directory}: use a path without *, ? and ["
            )
        self._retention = Retention(keep, best_metric, best_mode)
        self._read_only = read_only
        self._closed = False
        self._writer: Writer | None = None
        self._worker: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future | None = None

    def steps(self) -> list[int]:
        """The steps with a committed checkpoint, in ascending order, as the disk has them now."""
        if self._writes() and not self._closed and self.directory.exists():
            self._open()
        return list_steps(self.directory)

    def latest_step(self) -> int | None:
        """The newest committed step; None if there is none."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step best by `best_metric`, the newest of equals; None if none has a number."""
        return self._retention.best(self.directory) if self.steps() else None

    def save(
        self,
        step: int,
        state: Any,
        *,
        meta: Mapping[str, Any],
        data: Any,
        metrics: Mapping[str, float] | None = None,
        before: Callable[[Mapping[leaves.Keys, np.ndarray]], None] = lambda arrays: None,
    ) -> None:
        """Starts to save `state` as checkpoint `step`, once the save before is committed.

        Args:
          step: greater than every step saved so far.
          state: a dataclass pytree whose leaves nobody changes or donates until the save is done.
          meta: what to know about the run: JSON's own types, non-finite floats included.
          data: the input's position, see `encode`.
          metrics: numbers to judge checkpoints by.
          before: is called in the worker with the leaves on the host, before anything is written;
            what it raises is what the save fails with.

        Raises:
          UsageError: the state or the position cannot be stored.
          RuntimeError: read-only, closed, or `step` is not new.
          OSError: nothing can be written there.
          Exception: whatever the save before failed with.
        """
        self.wait()
        if self._read_only or self._closed:
            raise RuntimeError(f"cannot save step {step}: the checkpointer is read-only or closed")
        if jax.process_index() != 0:
            return
        self._open()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise RuntimeError(f"cannot save step {step}: {self.directory} already has {latest}")
        if (self.directory / str(step)).exists():
            raise FileExistsError(
                f"cannot save step {step}: {self.directory / str(step)} is in the way and is no"
                " checkpoint; move it elsewhere"
            )
        flat = leaves.flatten(state_fields(state))
        table = {keys: leaves.describe(leaves.join(keys), leaf) for keys, leaf in flat.items()}
        items = make_items(int(step), state, table, meta=meta, data=data, metrics=metrics or {})
        self.start_writer()  # Here, for it ends with the thread that starts it.
        if self._worker is None:
            self._worker = concurrent.futures.ThreadPoolExecutor(1, initializer=give_way)
        self._pending = self._worker.submit(self._write, int(step), [flat], table, items, before)

    def start_writer(self) -> None:
        """Starts what `save` needs, so that the first one need not wait for it: takes a second."""
        if self._writes():
            self._open().start()

    def buffers(self, specs: Sequence[Spec]) -> list[np.ndarray]:
        """Arrays of these shapes and dtypes, for the leaves of what `save` is given next.

        They are written from where they are; any other array is first copied. Those of an earlier
        call are not to be used any more.
        """
        return self._open().buffers(specs)

    def wait(self) -> None:
        """Returns when every save is committed; raises what a save failed with, once."""
        if self._pending is None:
            return
        pending = self._pending
        try:
            pending.result()
        finally:
            # An interrupt of the wait is not the end of the save.
            if pending.done():
                self._pending = None

    def is_idle(self) -> bool:
        """Whether no save is under way: `wait` would return, or raise, at once."""
        return self._pending is None or self._pending.done()

    def close(self) -> None:
        """Waits for the last save, raising what it failed with; then releases all. Idempotent."""
        try:
            self.wait()
        finally:
            self._closed = True
            if self._worker is not None:
                self._worker.shutdown()
            if self._writer is not None:
                self._writer.close()
            self._worker = self._writer = None

    def restore(
        self, step: int, target: State, *, fields: Sequence[str] | None = None
    ) -> Restored[State]:
        """Reads checkpoint `step` into the structure of `target`.

        Args:
          step: one of `steps()`.
          target: the dataclass that was saved, of ShapeDtypeStructs (`jax.eval_shape`) or arrays.
          fields: read and compare only these; the others stay as in `target`. All by default.

        Raises:
          UsageError: no such step; or leaves differ in path, shape, dtype or kind of key: all of
            them in one line, before any array is read.
          CheckpointDamaged: naming the item and the path of the leaf.
        """
        folder = Folder(self.directory, step)
        parts = state_fields(target)
        if fields is not None:
            parts = {name: parts[name] for name in fields}
        wanted = {
            path: leaves.describe(path, leaf)
            for path, leaf in ((leaves.join(k), v) for k, v in leaves.flatten(parts).items())
        }
        saved = folder.leaves()
        if fields is not None:
            saved = {path: leaf for path, leaf in saved.items() if item_of(path) in parts}
        if found := leaves.differences(saved, wanted):
            raise UsageError(
                f"checkpoint {folder.path} does not fit the experiment (restore it with the config"
                f" it was written with, or use another workdir): {'; '.join(found)}"
            )
        meta, data = folder.meta(), folder.data()
        arrays = read_arrays(folder, saved)
        # `wanted` is in the order in which JAX flattens the fields.
        values = [leaves.wrap(arrays[path], leaf) for path, leaf in wanted.items()]
        changes = jax.tree.unflatten(jax.tree.structure(parts), values)
        state = dataclasses.replace(target, **changes)  # type: ignore[type-var]
        return Restored(state, meta, data)

    def read(self, step: int) -> Restored[dict[str, np.ndarray]]:
        """Reads the whole of checkpoint `step`, with no target. Raises as `restore` does.

        The state comes as a table of its leaves by path; typed keys as their uint32 data.
        """
        folder = Folder(self.directory, step)
        arrays = read_arrays(folder, folder.leaves())
        return Restored(arrays, folder.meta(), folder.data())

    def newest_good(self, read: Callable[[int], T]) -> T | None:
        """What `read` makes of the newest checkpoint that is not damaged; None if there is none.

        A warning names each one that is passed over. A writer moves these into `.damaged/`, with
        whatever else has a step's name and is no checkpoint, so that their steps can be saved
        again; it does so only once a good one is found, for else the fault may be the reader's.

        Args:
          read: given a step, raises CheckpointDamaged or CheckpointMissing if it is not good; any
            other error ends the search.

        Raises:
          CheckpointDamaged: there are only damaged ones.
        """
        self.steps()  # A writer removes what a killed process left.
        damaged: dict[int, CheckpointDamaged] = {}
        tried: set[int] = set()
        # Listed anew each time: if a trainer deletes what is being read, it has a newer one.
        while left := set(named_steps(self.directory)) - tried:
            step = max(left)
            tried.add(step)
            try:
                Folder(self.directory, step).check_is_checkpoint()
                result = read(step)
            except CheckpointDamaged as error:
                damaged[step] = error
            except CheckpointMissing:
                continue
            else:
                self._pass_over(damaged, step)
                return result
        if not damaged:
            return None
        newest = max(damaged)
        others = [str(step) for step in sorted(damaged) if step != newest]
        so_are = f", as are those of {', '.join(others)}" if others else ""
        raise CheckpointDamaged(
            f"{damaged[newest]}{so_are}; there is no good one to go on from: put the files back, "
            "or move that folder away to start anew"
        )

    def _pass_over(self, damaged: Mapping[int, CheckpointDamaged], good: int) -> None:
        """Warns of damaged checkpoints, and moves them away if this process writes here."""
        if self._writes():
            strays = set(named_steps(self.directory)) - set(list_steps(self.directory))
            for step in sorted({*damaged, *strays}):
                why = damaged.get(step) or f"{self.directory / str(step)} is no checkpoint"
                moved = set_aside(self.directory, step)
                self._open().forget()
                logging.warning("%s; moved to %s; going on from step %d", why, moved, good)
            for name in other_folders(self.directory):
                where = self.directory / name
                logging.warning("%s is no checkpoint; it is left where it is", where)
        else:
            for error in damaged.values():
                logging.warning("%s; passed over for step %d", error, good)

    def read_meta(self, step: int) -> dict[str, Any]:
        """The metadata of checkpoint `step`, its arrays unread. Raises as `restore` does."""
        return Folder(self.directory, step).meta()

    def _open(self) -> Writer:
        """What writes; only in the process that does."""
        if self._writer is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.directory)
            self._writer = Writer(self.directory, self._retention)
        return self._writer

    def _writes(self) -> bool:
        return not self._read_only and jax.process_index() == 0

    def _write(
        self,
        step: int,
        box: list,
        table: dict,
        items: dict[str, Any],
        before: Callable[[Mapping[leaves.Keys, np.ndarray]], None],
    ) -> None:
        """Commits one checkpoint; runs in the worker."""
        # In a box, so that the device's copy is freed as soon as the host has its own.
        arrays = leaves.fetch(box.pop())

        def checksums() -> dict[str, Any]:
            before(arrays)
            return make_checksums(table, arrays, items)

        self._open().write(step, table, arrays, items, checksums)
