"""What lies in a checkpoint's folder beside arrays: JSON items that tell and verify what is there.

Needs no Orbax: to list checkpoints and to read what is known of them is to read small text files.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from haikutrain import os_errors
from haikutrain.errors import (
    CheckpointDamaged,
    CheckpointMissing,
    CheckpointUnreadable,
    UsageError,
)
from haikutrain.leaves import Keys, Leaf, crc32, join
from haikutrain.positions import decode, encode

FORMAT = 1
"""Of the folder; in `meta`."""

RESERVED = ("data", "meta", "checksums", "metrics", "default")
"""Names that a field of a state cannot have: these items are ours, or Orbax's own."""

STEP = re.compile("0|[1-9][0-9]*")
"""The names of checkpoints."""


class Folder:
    """`<directory>/<step>/`, for reading. Every method may raise three errors.

    CheckpointMissing: the directory has no checkpoint of that step, or has it no longer.
    CheckpointDamaged: an item is missing, makes no sense, or is not what its checksum says.
    CheckpointUnreadable: the files cannot be read now, for a reason that is not in them.
    """

    def __init__(self, directory: pathlib.Path, step: int):
        self.directory = directory
        self.step = step

    @property
    def path(self) -> pathlib.Path:
        """Where it is."""
        return self.directory / str(self.step)

    def meta(self) -> dict[str, Any]:
        """The metadata."""
        meta = self._json("meta")
        if meta.get("step") != self.step:
            raise self.damaged("meta", f"it is of step {meta.get('step')}: the folder was renamed")
        if meta.get("format", FORMAT) != FORMAT:
            raise UsageError(
                f"checkpoint {self.path} is in format {meta['format']}, and this version of "
                f"haikutrain reads format {FORMAT}; use the version that wrote it"
            )
        return meta

    def data(self) -> Any:
        """The input's position, as it was given to `Checkpointer.save`."""
        return decode(self._json("data")["position"])

    def leaves(self) -> dict[str, Leaf]:
        """What each leaf of the state is, by path."""
        return {
            path: Leaf(tuple(entry["shape"]), entry["dtype"], entry.get("key_impl"))
            for path, entry in self._checksums["leaves"].items()
        }

    def checks(self, field: str, arrays: Mapping[str, np.ndarray]) -> list[Callable[[], None]]:
        """Functions that check that `arrays`, by path, are the leaves of a field, bit for bit.

        One for each leaf, to be called in any thread; each may raise CheckpointDamaged. Leaves
        without elements were not stored and are not expected.
        """
        saved = {p: leaf for p, leaf in self.leaves().items() if leaf.size and item_of(p) == field}
        for path in sorted(saved.keys() ^ arrays.keys()):
            raise self.damaged(field, f"{path} is missing, or was never saved")
        return [
            functools.partial(self._check, field, path, leaf, arrays[path])
            for path, leaf in saved.items()
        ]

    def _check(self, field: str, path: str, leaf: Leaf, array: np.ndarray) -> None:
        if (array.shape, array.dtype.name) != (leaf.shape, leaf.dtype):
            raise self.damaged(field, f"{path} is not {leaf}, as it was saved")
        if crc32(array) != self._checksums["leaves"][path]["crc32"]:
            raise self.damaged(field, f"{path} has other values than were saved")

    def check_is_checkpoint(self) -> None:
        """Raises CheckpointDamaged if what has the step's name is no checkpoint at all."""
        if not _is_checkpoint(self.path) and os.path.lexists(self.path):
            raise self.damaged("checksums", "it is missing, and so is item meta")

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Turns whatever goes wrong in reading an item into one of the three errors."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            # Never there, or expired and deleted by the trainer while this process was reading.
            steps = list_steps(self.directory)
            if self.step not in steps:
                have = ", ".join(map(str, steps)) or "none"
                raise CheckpointMissing(
                    f"{self.directory} has no checkpoint of step {self.step}; it has: {have}"
                ) from error
            why = _outer_reason(error, self.path / name)
            if why is not None:
                raise CheckpointUnreadable(
                    f"checkpoint {self.path} cannot be read: item {name}: {why}; this says nothing "
                    "about what is in it: start again when it can be read"
                ) from error
            raise self.damaged(name, os_errors.reason(error)) from error

    def damaged(self, name: str, why: str) -> CheckpointDamaged:
        """The error that says so."""
        return CheckpointDamaged(f"checkpoint {self.path} is damaged: item {name}: {why}")

    def _json(self, name: str) -> dict[str, Any]:
        expected = self._checksums[name]
        with self.reading(name):
            value = json.loads((self.path / name / "metadata").read_text())
            if _json_crc32(value) != expected:
                raise ValueError("it has other values than were saved")
        return value

    @functools.cached_property
    def _checksums(self) -> dict[str, Any]:
        with self.reading("checksums"):
            sums = json.loads((self.path / "checksums" / "metadata").read_text())
            if sums.pop("crc32") != _json_crc32(sums):
                raise ValueError("it has other values than were saved")
        return sums


def _outer_reason(error: BaseException, item: pathlib.Path) -> str | None:
    """Why an item cannot be read, if that does not lie in its files; else None."""
    if os_errors.is_from_outside(error):
        return os_errors.reason(error)
    # Orbax does not always pass on what the system said, so it is asked once more.
    try:
        for folder, _, names in os.walk(item, onerror=_raise):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    while file.read(1 << 24):
                        pass
    except OSError as found:
        return os_errors.reason(found) if os_errors.is_from_outside(found) else None
    return None


def _raise(error: OSError) -> None:
    raise error


def state_fields(state: Any) -> dict[str, Any]:
    """The fields of a state by name; UsageError for a name that a checkpoint needs itself."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    for name in fields.keys() & set(RESERVED):
        raise UsageError(f"a field of the state is called {name!r}, a reserved name; rename it")
    return fields


def make_items(
    step: int,
    state: Any,
    table: Mapping[Keys, Leaf],
    *,
    meta: Mapping[str, Any],
    data: Any,
    metrics: Mapping[str, float],
) -> dict[str, Any]:
    """The `meta` and `data` items of a checkpoint of `state`, whose leaves `table` describes.

    Raises ValueError if the caller's `meta` has a name that is added here, TypeError if it is not
    JSON, UsageError if the position cannot be stored.
    """
    stored = {keys[0] for keys, leaf in table.items() if leaf.size}
    added = {
        "step": step,
        "format": FORMAT,
        "empty": [name for name in state_fields(state) if name not in stored],
        "metrics": {name: float(value) for name, value in metrics.items()},
        "versions": _versions(),
    }
    if taken := meta.keys() & added.keys():
        raise ValueError(f"meta has {sorted(taken)} of its own: the checkpointer sets these")
    # A copy that the caller cannot change while it waits to be written.
    text = json.dumps({"meta": {**meta, **added}, "data": {"position": encode(data)}})
    return json.loads(text)


def make_checksums(
    table: Mapping[Keys, Leaf], arrays: Mapping[Keys, np.ndarray], items: Mapping[str, Any]
) -> dict[str, Any]:
    """The `checksums` item: of every leaf, of the other JSON items, and of itself."""
    entries = {}
    for keys, leaf in table.items():
        known = {name: value for name, value in vars(leaf).items() if value is not None}
        entries[join(keys)] = {**known, "crc32": crc32(arrays[keys])}
    sums = {"leaves": entries, **{name: _json_crc32(value) for name, value in items.items()}}
    return {**sums, "crc32": _json_crc32(sums)}


def item_of(path: str) -> str:
    """The field that a leaf's path lies in: the name of its Orbax item."""
    return path.split("/")[0]


def _json_crc32(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def list_steps(directory: pathlib.Path) -> list[int]:
    """The steps with a committed checkpoint in a directory, ascending; none if it is not there.

    Raises CheckpointUnreadable if the directory cannot be read.
    """
    return [step for step in named_steps(directory) if _is_checkpoint(directory / str(step))]


def named_steps(directory: pathlib.Path) -> list[int]:
    """The steps by whose names there is anything in a directory, a checkpoint or not, ascending.

    Raises CheckpointUnreadable if the directory cannot be read.
    """
    try:
        return sorted(int(name) for name in os.listdir(directory) if STEP.fullmatch(name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointUnreadable(f"{directory} cannot be read: {error.strerror}") from error


def find_checkpoint(path: str | pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """The directory of checkpoints that a path means, and the step if it names one.

    Args:
      path: a workdir (which has `checkpoints/`), a directory of checkpoints, or one checkpoint.

    Raises:
      UsageError: it is none of them, or holds no checkpoint.
    """
    path = pathlib.Path(path).absolute()
    if _is_checkpoint(path):
        return path.parent, int(path.name)
    for directory in (path / "checkpoints", path):
        if list_steps(directory):
            return directory, None
    raise UsageError(
        f"{path} holds no checkpoint; give a workdir, its checkpoints/, or one step's directory"
    )


def _is_checkpoint(path: pathlib.Path) -> bool:
    # Orbax writes under another name and renames last; an empty directory was made by others.
    if not STEP.fullmatch(path.name):
        return False
    for item in ("checksums", "meta"):
        try:
            if stat.S_ISDIR(os.stat(path / item).st_mode):
                return True
        except OSError as error:
            # One that cannot be looked into may be one: whoever reads it is told why.
            if not os_errors.is_missing_file(error):
                return True
    return False


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in ("haikutrain", "jax", "orbax-checkpoint"):
        # A checkout that is not installed has no version.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
