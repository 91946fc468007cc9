"""Random access to examples in files, an image or a record at a time; errors name the file."""

import importlib
import operator
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from haikutrain.errors import UsageError

Path = str | os.PathLike[str]

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def refused(path: Path, found: str, expected: str) -> UsageError:
    """The error for a file that is not what it should be."""
    return UsageError(f"cannot read {os.fspath(path)}: {found}; expected {expected}")


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.strip().split("\n")[0] or type(error).__name__


class ImageFolder:
    """What `haikutrain.readers.image_folder` returns.

    Attributes:
      directory: the absolute path.
      class_names: `class_names[label]` is a folder's name.
      shape: `(H, W)` of every image, or None.
    """

    def __init__(
        self,
        directory: Path,
        class_names: Sequence[str] | None = None,
        shape: tuple[int, int] | None = None,
    ):
        _import("PIL.Image", "Pillow", "pip install 'haikutrain[images]'")
        self.directory = os.path.abspath(directory)
        self.shape = shape
        found = sorted(entry.name for entry in _entries(directory) if entry.is_dir())
        self.class_names = list(found if class_names is None else class_names)
        if not found or not set(found) <= set(self.class_names):
            raise refused(
                directory,
                f"it has the folders {found}",
                f"one for each of the classes {self.class_names or '(no names were given)'}",
            )
        names = [self._images(name) if name in found else [] for name in self.class_names]
        self._names = [name for of_class in names for name in of_class]
        self._labels = np.repeat(np.arange(len(names), dtype=np.int32), [len(n) for n in names])

    def _images(self, class_name: str) -> list[str]:
        folder = os.path.join(self.directory, class_name)
        files = (entry.name for entry in _entries(folder))
        names = sorted(name for name in files if pathlib.Path(name).suffix.lower() in _SUFFIXES)
        if not names:
            raise refused(folder, "no image is in it", f"files like *.jpg or *{min(_SUFFIXES)}")
        return names

    def path(self, index: int) -> str:
        """The file of element `index`."""
        folder = self.class_names[self._labels[index]]
        return os.path.join(self.directory, folder, self._names[index])

    def __len__(self) -> int:
        """The number of images."""
        return len(self._names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`{"image": uint8 [H, W, 3], "label": int}`."""
        index = operator.index(index)
        image = _decode(self.path(index))
        if self.shape is not None and image.shape[:2] != tuple(self.shape):
            raise refused(
                self.path(index), f"it is an image of {image.shape[:2]}", f"(H, W) = {self.shape}"
            )
        return {"image": image, "label": int(self._labels[index])}


def _decode(path: str) -> np.ndarray:
    from PIL import Image

    expected = "an image of 8 bits a channel"
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":
                raise refused(path, f"its mode is {image.mode}", expected)
            # Transparent palettes go through RGBA: Pillow warns of the direct way.
            whole = image.convert("RGBA") if image.mode == "P" else image
            return np.array(whole.convert("RGB"))
    except UsageError:
        raise
    except Exception as error:  # Pillow's plugins raise what they like on damaged files.
        raise refused(path, first_line(error), expected) from error


class ArrayRecords:
    """What `haikutrain.readers.array_record` returns.

    Attributes:
      paths: the absolute paths of the files.
    """

    _EXPECTED = "an array_record file, whole, that holds records"

    def __init__(self, paths: Path | Sequence[Path], decode: Callable[[bytes], Any]):
        if isinstance(paths, str | os.PathLike):
            paths = [paths]
        self.paths = [os.path.abspath(path) for path in paths]
        self._decode = decode
        if not self.paths:
            raise UsageError("array_record: no files were given (does the pattern match any?)")
        sizes = [self._size(path) for path in self.paths]
        self._ends = np.cumsum(sizes)
        self._source = self._open(self.paths)

    @staticmethod
    def _open(paths: list[str]) -> Any:
        name = "array_record.python.array_record_data_source"
        return _import(name, "array_record", "pip install array_record").ArrayRecordDataSource(
            paths
        )

    def _size(self, path: str) -> int:
        try:
            os.stat(path)  # The library's own error does not say that there is no file.
            size = len(self._open([path]))
        except Exception as error:
            if isinstance(error, UsageError):
                raise
            raise refused(path, first_line(error), self._EXPECTED) from error
        if size == 0:
            raise refused(path, "it has no records", self._EXPECTED)
        return size

    def __len__(self) -> int:
        """The number of records in all files."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """`decode` of record `index`."""
        index = operator.index(index)
        shard = int(np.searchsorted(self._ends, index, side="right"))
        if index < 0 or shard == len(self.paths):
            raise IndexError(index)
        try:
            return self._decode(self._source[index])
        except Exception as error:
            place = index - int(self._ends[shard - 1]) if shard else index
            what = f"record {place}: {type(error).__name__}: {first_line(error)}"
            raise refused(self.paths[shard], what, "records that decode") from error


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            yield from (entry for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise refused(directory, first_line(error), "a folder") from error


def _import(name: str, package: str, command: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{package} is not installed; {command}") from error
