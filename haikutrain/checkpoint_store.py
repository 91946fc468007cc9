"""The only door to Orbax: how the items of a checkpoint reach the disk, and how they come back."""

import concurrent.futures
import functools
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from haikutrain import leaves
from haikutrain.checkpoint_folder import Folder, item_of
from haikutrain.checkpoint_retention import TRASH, remove_leftovers


def warm_up() -> None:
    """Imports what `Store` needs."""
    import orbax.checkpoint

    del orbax
    jax.process_index()


class Store:
    """Writes checkpoints to a directory; one thread at a time.

    Args:
      directory: absolute, and there.
      expired: says, after each write, which steps to delete.
    """

    def __init__(self, directory: pathlib.Path, expired: Callable[[], set[int]]):
        self._directory = directory
        self._expired = expired
        self._manager: Any = None
        _quiet()

    def write(
        self,
        step: int,
        table: Mapping[leaves.Keys, leaves.Leaf],
        arrays: Mapping[leaves.Keys, np.ndarray],
        texts: Mapping[str, Any],
    ) -> None:
        """Commits a checkpoint, all of it or nothing, and deletes those that it makes expire.

        Args:
          step: its name.
          table: what each leaf is; its first key names the item it goes into.
          arrays: their values.
          texts: the JSON items, or functions that return them, called while all else is written.

        Raises:
          Exception: of any kind, Orbax's, for a full disk as well; see `os_errors.reason`.
        """
        import orbax.checkpoint as ocp

        args: dict[str, Any] = {name: ocp.args.JsonSave(item) for name, item in texts.items()}
        # Orbax stores neither empty trees nor arrays without elements; the table knows of them.
        for name in {keys[0] for keys, leaf in table.items() if leaf.size}:
            values = {k[1:]: array for k, array in arrays.items() if k[0] == name and array.size}
            args[name] = ocp.args.PyTreeSave(leaves.nest(values))
        try:
            if self._manager is None:
                self._manager = self._make_manager()
            # Not forced, Orbax would answer False to a step that it thinks untimely.
            self._manager.save(step, args=ocp.args.Composite(**args), force=True)
        except BaseException:
            # This manager counts the failed save as there.
            self._manager = None
            raise
        finally:
            remove_leftovers(self._directory)

    def close(self) -> None:
        """Frees what it holds."""
        if self._manager is not None:
            self._manager.close()
        self._manager = None

    def _make_manager(self) -> Any:
        import orbax.checkpoint as ocp

        # Its handler of NumPy arrays makes a copy of each first; nobody changes these meanwhile.
        numpy_handler = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
        arrays = ocp.PyTreeCheckpointHandler(
            use_compression=False,
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (np.ndarray, numpy_handler)
            ),
        )
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add(None, ocp.args.PyTreeSave, arrays)
        registry.add(None, ocp.args.JsonSave, _text_handler())
        manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                create=False,
                todelete_subdir=TRASH,
                enable_async_checkpointing=False,
                preservation_policy=_Retention(self._expired),
                save_root_metadata=False,
            ),
            handler_registry=registry,
        )
        # Preemption is the training loop's affair; here it would be a call all processes share.
        manager.reached_preemption = lambda step: False
        return manager


def _text_handler() -> Any:
    """Orbax's handler of JSON items, for texts that are late, with no event loop for each."""
    import orbax.checkpoint as ocp

    class Handler(ocp.JsonCheckpointHandler):
        async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> list:
            return [_Text(directory, args.item)]

    # A checkpoint holds its handlers' names; these items are what this one reads.
    Handler.__module__ = ocp.JsonCheckpointHandler.__module__
    Handler.__qualname__ = ocp.JsonCheckpointHandler.__qualname__
    return Handler()


class _Text:
    """A text that is written when Orbax waits for it."""

    def __init__(self, directory: Any, item: Any):
        self._directory = directory
        self._item = item

    def result(self, timeout: int | None = None) -> None:
        del timeout
        item = self._item() if callable(self._item) else self._item
        (self._directory / "metadata").write_text(json.dumps(item))


class _Retention:
    """Orbax's preservation policy: everything but what has expired."""

    def __init__(self, expired: Callable[[], set[int]]):
        self._expired = expired

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        expired = self._expired()
        return [checkpoint.step not in expired for checkpoint in checkpoints]


def read_arrays(folder: Folder, table: Mapping[str, leaves.Leaf]) -> dict[str, np.ndarray]:
    """The values of the leaves in `table` (all leaves of some fields) by path, verified.

    Raises as the methods of `Folder` do.
    """
    import orbax.checkpoint as ocp

    _quiet()
    options = _multiprocessing(ocp)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    arrays = {
        path: np.zeros(leaf.shape, leaves.numpy_dtype(leaf.dtype))
        for path, leaf in table.items()
        if not leaf.size
    }
    with (
        ocp.Checkpointer(handler, multiprocessing_options=options) as reader,
        # zlib lets other threads run: one item is verified while the next is read.
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as workers,
    ):
        checks = []
        for name in dict.fromkeys(item_of(path) for path, leaf in table.items() if leaf.size):
            # Without a target: given one, Orbax bends shapes and dtypes to it in silence.
            with folder.reading(name):
                found = leaves.leaf_table({name: reader.restore(folder.path / name)})
            checks += [workers.submit(check) for check in folder.checks(name, found)]
            arrays.update(found)
        for check in checks:
            check.result()
    return arrays


@functools.cache
def _quiet() -> None:
    """Silences what threads of Orbax say, also later, of an error that it raises: it is said once.

    Those of a failed save log it with a traceback each. Those of a failed read find the event loop
    closed that they were to answer to.
    """
    source = os.path.join("orbax", "checkpoint", "_src", "futures", "future.py")
    logging.getLogger("absl").addFilter(lambda record: not record.pathname.endswith(source))
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _multiprocessing(ocp: Any) -> Any:
    """Orbax's options for a process that acts alone, so that one that fails hangs no other."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"haikutrain_{own}"
    )
