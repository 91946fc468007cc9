"""Checkpoints on disk: save, restore, keep, best. The only door to Orbax.

`<directory>/<step>/` holds one Orbax item per field of the state, NumPy arrays without a device
axis, and three JSON items: `meta` (what is known about the run), `data` (the position of the input)
and `checksums` (shape, dtype and CRC-32 of every leaf: Orbax's array data has no checksum).
"""

import concurrent.futures
import dataclasses
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from haikutrain import leaves
from haikutrain.checkpoint_folder import (
    Folder,
    find_best,
    find_checkpoint,
    item_of,
    list_steps,
    make_checksums,
    make_items,
    state_fields,
)
from haikutrain.errors import UsageError
from haikutrain.leaves import digest
from haikutrain.positions import decode, encode

__all__ = [
    "Checkpointer",
    "Restored",
    "decode",
    "digest",
    "encode",
    "find_checkpoint",
]

_TRASH = ".trash"

State = TypeVar("State")


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

    Saving is asynchronous, one save at a time, in one worker thread. Several processes: process 0
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
        self.keep = keep
        self._best_metric = best_metric
        self._best_mode = best_mode
        self._read_only = read_only
        self._opened = False
        self._closed = False
        self._manager: Any = None
        self._worker: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future | None = None

    def steps(self) -> list[int]:
        """The steps with a committed checkpoint, in ascending order, as the disk has them now."""
        if not self.directory.exists():
            return []
        self._open()
        return list_steps(self.directory)

    def latest_step(self) -> int | None:
        """The newest committed step; None if there is none."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step best by `best_metric`, the newest of equals; None if none has a number."""
        if self._best_metric is None or not self.steps():
            return None
        return find_best(self.directory, self._best_metric, self._best_mode)

    def save(
        self,
        step: int,
        state: Any,
        *,
        meta: Mapping[str, Any],
        data: Any,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts to save `state` as checkpoint `step`, once the save before is committed.

        Args:
          step: greater than every step saved so far.
          state: a dataclass pytree whose leaves nobody changes or donates until the save is done.
          meta: what to know about the run: JSON's own types, non-finite floats included.
          data: the input's position, see `encode`.
          metrics: numbers to judge checkpoints by.

        Raises:
          UsageError: the state or the position cannot be stored.
          RuntimeError: read-only, closed, or `step` is not new.
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
            raise RuntimeError(
                f"cannot save step {step}: {self.directory / str(step)} is in the way and is no"
                " checkpoint; move it elsewhere"
            )
        flat = leaves.flatten(state_fields(state))
        table = {keys: leaves.describe(leaves.join(keys), leaf) for keys, leaf in flat.items()}
        items = make_items(int(step), state, table, meta=meta, data=data, metrics=metrics or {})
        if self._worker is None:
            self._worker = concurrent.futures.ThreadPoolExecutor(1, "haikutrain-checkpoint")
        self._pending = self._worker.submit(self._write, int(step), [flat], table, items)

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

    def close(self) -> None:
        """Waits for the last save, raising what it failed with; then releases all. Idempotent."""
        try:
            self.wait()
        finally:
            self._closed = True
            if self._worker is not None:
                self._worker.shutdown()
            if self._manager is not None:
                self._manager.close()
            self._worker = self._manager = None

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
        arrays = _read_arrays(folder, saved)
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
        arrays = _read_arrays(folder, folder.leaves())
        return Restored(arrays, folder.meta(), folder.data())

    def read_meta(self, step: int) -> dict[str, Any]:
        """The metadata of checkpoint `step`, its arrays unread. Raises as `restore` does."""
        return Folder(self.directory, step).meta()

    def _open(self) -> None:
        """Makes a writer's directory, and removes what a killed process left in it."""
        if self._opened or self._read_only or jax.process_index() != 0:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        # Now, for the first import of Orbax in the worker would hold up the training loop.
        self._manager = _make_manager(self)
        self._opened = True

    def _remove_leftovers(self) -> None:
        for path in [self.directory / _TRASH, *self.directory.glob("*.orbax-checkpoint-tmp*")]:
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, step: int, box: list, table: dict, items: dict[str, Any]) -> None:
        """Commits one checkpoint; runs in the worker."""
        import orbax.checkpoint as ocp

        # In a box, so that the device's copy is freed as soon as the host has its own.
        arrays = leaves.fetch(box.pop())
        items = {**items, "checksums": make_checksums(table, arrays, items)}
        args: dict[str, Any] = {name: ocp.args.JsonSave(item) for name, item in items.items()}
        # Orbax stores neither empty trees nor arrays without elements; the table knows of them.
        for name in {keys[0] for keys, leaf in table.items() if leaf.size}:
            values = {k[1:]: array for k, array in arrays.items() if k[0] == name and array.size}
            args[name] = ocp.args.PyTreeSave(leaves.nest(values))
        try:
            if self._manager is None:
                self._manager = _make_manager(self)
            # Not forced, Orbax would answer False to a step that it thinks untimely.
            self._manager.save(step, args=ocp.args.Composite(**args), force=True)
        except BaseException:
            # This manager counts the failed save as there.
            self._manager = None
            raise
        finally:
            self._remove_leftovers()


class _Retention:
    """Orbax's preservation policy: the newest, the best, and whatever is no checkpoint."""

    def __init__(self, checkpointer: Checkpointer):
        self._checkpointer = checkpointer

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = self._checkpointer.steps()
        expired = set(steps[: -self._checkpointer.keep]) - {self._checkpointer.best_step()}
        return [checkpoint.step not in expired for checkpoint in checkpoints]


def _make_manager(checkpointer: Checkpointer) -> Any:
    import orbax.checkpoint as ocp

    options = _multiprocessing(ocp)
    arrays = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=options)
    texts = ocp.JsonCheckpointHandler(multiprocessing_options=options)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(None, ocp.args.PyTreeSave, arrays)
    registry.add(None, ocp.args.JsonSave, texts)
    manager = ocp.CheckpointManager(
        checkpointer.directory,
        options=ocp.CheckpointManagerOptions(
            create=False,
            todelete_subdir=_TRASH,
            enable_async_checkpointing=False,
            preservation_policy=_Retention(checkpointer),
            save_root_metadata=False,
            multiprocessing_options=options,
        ),
        handler_registry=registry,
    )
    # Preemption is the training loop's affair; here it would be a call that all processes share.
    manager.reached_preemption = lambda step: False
    return manager


def _read_arrays(folder: Folder, table: Mapping[str, leaves.Leaf]) -> dict[str, np.ndarray]:
    """The values of the leaves in `table` (all leaves of some fields), verified."""
    import orbax.checkpoint as ocp

    options = _multiprocessing(ocp)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    arrays = {
        path: np.zeros(leaf.shape, leaves.numpy_dtype(leaf.dtype))
        for path, leaf in table.items()
        if not leaf.size
    }
    with ocp.Checkpointer(handler, multiprocessing_options=options) as reader:
        for name in dict.fromkeys(item_of(path) for path, leaf in table.items() if leaf.size):
            # Without a target: given one, Orbax bends shapes and dtypes to it in silence.
            with folder.reading(name):
                found = leaves.leaf_table({name: reader.restore(folder.path / name)})
            folder.verify(name, found)
            arrays.update(found)
    return arrays


def _multiprocessing(ocp: Any) -> Any:
    """Orbax's options for a process that acts alone, so that one that fails hangs no other."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"haikutrain_{own}"
    )
