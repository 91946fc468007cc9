"""Memory that two processes see: arrays that one fills and the other reads, without a copy."""

import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np

Spec = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of an array."""

_ALIGNED = 64


class SharedMemory:
    """Anonymous memory with a file descriptor, by which another process maps it as well.

    It is freed when all arrays on it are gone, in both processes.

    Args:
      size: in bytes.
      file: a descriptor from another process's `file`; without one, new memory is made.
    """

    def __init__(self, size: int, file: int | None = None):
        self.size = size
        self.file = _new_file() if file is None else file
        if file is None:
            os.ftruncate(self.file, max(size, 1))
        self._bytes = np.frombuffer(mmap.mmap(self.file, max(size, 1)), np.uint8)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)

    @staticmethod
    def size_of(specs: Sequence[Spec]) -> int:
        """How many bytes arrays like these need."""
        return sum(map(_room, specs))

    def arrays(self, specs: Sequence[Spec]) -> list[np.ndarray]:
        """Arrays on this memory, from its beginning, whatever lies there."""
        offsets = np.cumsum([0, *map(_room, specs)])
        return [self.array(*spec, int(at)) for spec, at in zip(specs, offsets, strict=False)]

    def array(self, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> np.ndarray:
        """The array at an offset."""
        return np.ndarray(shape, dtype, self._bytes, offset)

    def offset(self, array: np.ndarray) -> int | None:
        """Where an array lies in this memory; None if it is not here, or not contiguous."""
        at = array.ctypes.data - self._bytes.ctypes.data
        if not array.flags.c_contiguous or not 0 <= at <= self.size - array.nbytes:
            return None
        return at


def _room(spec: Spec) -> int:
    shape, dtype = spec
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return -(-count // _ALIGNED) * _ALIGNED


def _new_file() -> int:
    # /dev/shm is small in many containers; this is not of it.
    if hasattr(os, "memfd_create"):
        return os.memfd_create("haikutrain")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
