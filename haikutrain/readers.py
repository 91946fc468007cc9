"""Data sets from local files: npz, MNIST, CIFAR, a folder of images per class, array_record.

Nothing is downloaded and nothing unpickled. `read_*` give arrays in memory, for
`haikutrain.ArrayDataset`; `image_folder` and `array_record` give random-access sources that read
an example when asked for it, for `grain.MapDataset.source`. Images are uint8 as they were stored,
`[..., H, W, C]`: scale them on the device, in the loss, where it is cheapest. Labels are int32.

Every reader raises UsageError, naming the file and what was expected of it, for files that are
missing, damaged, truncated or empty.
"""

import gzip
import math
import os
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from haikutrain.errors import UsageError
from haikutrain.sources import ArrayRecords, ImageFolder, Path, first_line, refused

Arrays = dict[str, np.ndarray]


# --- arrays in memory ----------------------------------------------------------------------------


def read_npz(path: Path) -> Arrays:
    """The arrays of an `.npz` file, as `numpy.savez` writes it.

    Returns:
      Each array under its name, as stored: `[N, ...]`, numeric, with one N for all.
    """
    expected = "an .npz file of numeric arrays with one row an example"
    try:
        # Opened here, for np.load leaves a damaged file open.
        with open(path, "rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise refused(path, "it holds a single array", f"{expected} (numpy.savez)")
            arrays = {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, UsageError):
            raise
        raise refused(path, first_line(error), expected) from error
    for name, array in arrays.items():
        if array.ndim == 0 or array.dtype.kind not in "biufc":
            raise refused(path, f"{name!r} has dtype {array.dtype}, shape {array.shape}", expected)
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise refused(path, f"its arrays have {sizes or 'no'} rows", expected)
    return arrays


def read_mnist(directory: Path, split: str) -> Arrays:
    """MNIST, or any data set in its format, such as Fashion-MNIST and KMNIST.

    Args:
      directory: holds the four files, gzipped or not, named as in `train-images-idx3-ubyte` or as
        in `train-images.idx3-ubyte`.
      split: "train" or "test" (whose files begin with `t10k`).

    Returns:
      `image`: uint8 `[N, H, W, 1]`, 28x28 in MNIST; `label`: int32 `[N]`.

    References:
      The idx format: Y. LeCun, C. Cortes and C. Burges, The MNIST database of handwritten digits,
      yann.lecun.com/exdb/mnist.
    """
    prefix = _choose("read_mnist", split, {"train": "train", "test": "t10k"})
    images_path = _find_idx(directory, f"{prefix}-images", "idx3")
    labels_path = _find_idx(directory, f"{prefix}-labels", "idx1")
    images, labels = _read_idx(images_path, 3), _read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise refused(labels_path, f"{len(labels)} labels", f"one for each of {len(images)} images")
    return {"image": images[..., None], "label": labels.astype(np.int32)}


def _find_idx(directory: Path, stem: str, kind: str) -> pathlib.Path:
    names = [f"{stem}{sep}{kind}-ubyte{end}" for sep in "-." for end in ("", ".gz")]
    return _find(directory, names)


def _read_idx(path: pathlib.Path, rank: int) -> np.ndarray:
    """An idx file of bytes: two zeros, the type (8 is uint8), the rank, big-endian sizes, data."""
    expected = f"an idx file of uint8 of rank {rank}, whole"
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise refused(path, first_line(error), expected) from error
    if content[:4] != bytes([0, 0, 8, rank]) or len(content) < 4 + 4 * rank:
        raise refused(path, f"it begins with the bytes {content[:4].hex(' ') or 'none'}", expected)
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", rank, offset=4))
    data = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
    if data.size != math.prod(shape) or data.size == 0:
        raise refused(path, f"{data.size} bytes of data for the shape {list(shape)}", expected)
    return data.reshape(shape)


def read_cifar(directory: Path, split: str, classes: int = 10) -> Arrays:
    """CIFAR-10 or CIFAR-100, in the binary version.

    Args:
      directory: holds the `.bin` files, or the folder `cifar-10-batches-bin` or
        `cifar-100-binary` that the archive unpacks to.
      split: "train" or "test".
      classes: 10 or 100.

    Returns:
      `image`: uint8 `[N, 32, 32, 3]`; `label`: int32 `[N]`; of CIFAR-100 also `coarse_label`:
      int32 `[N]`, the one of 20 superclasses.

    References:
      A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009;
      www.cs.toronto.edu/~kriz/cifar.html.
    """
    if classes == 10:
        folder, limits = "cifar-10-batches-bin", {"label": 10}
        splits = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
    elif classes == 100:
        folder, limits = "cifar-100-binary", {"coarse_label": 20, "label": 100}
        splits = {"train": ["train.bin"], "test": ["test.bin"]}
    else:
        raise UsageError(f"read_cifar: classes={classes}; there are CIFAR-10 and CIFAR-100")
    names = _choose("read_cifar", split, splits)
    inner = pathlib.Path(directory, folder)
    home = inner if inner.is_dir() else directory
    parts = [_read_cifar_file(_find(home, [name]), limits) for name in names]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _read_cifar_file(path: pathlib.Path, limits: dict[str, int]) -> Arrays:
    """Records of one byte for each kind of label, then 3 planes of 32x32 bytes."""
    size = len(limits) + 3 * 32 * 32
    expected = f"records of {size} bytes, as in the binary version of CIFAR"
    content = _read_bytes(path, expected)
    if not content or len(content) % size:
        raise refused(path, f"it has {len(content)} bytes", expected)
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    arrays = {name: records[:, i].astype(np.int32) for i, name in enumerate(limits)}
    for name, limit in limits.items():
        if (largest := arrays[name].max()) >= limit:
            raise refused(path, f"it has a {name} {largest} of {limit} classes", expected)
    planes = records[:, len(limits) :].reshape(-1, 3, 32, 32)
    return {"image": np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), **arrays}


# --- random access, an example at a time ---------------------------------------------------------


def image_folder(
    directory: Path,
    class_names: Sequence[str] | None = None,
    shape: tuple[int, int] | None = None,
) -> ImageFolder:
    """A random-access source of the images in a folder of folders, one for each class.

    Element i is `{"image": uint8 [H, W, 3], "label": int}`, decoded by Pillow when asked for, in
    the image's own size: for batches, a transformation must make all sizes equal. The order is
    that of the sorted class names, and in a class that of the sorted file names. Picklable, for
    worker processes. Hidden files, and files without an image's suffix, are left out.

    Args:
      directory: holds the folders.
      class_names: which folders there are, in the order of their labels; by default all, sorted.
        Give a training set's to read another split, so that labels mean the same.
      shape: `(H, W)` that each image must have, or None.

    Returns:
      A source with `class_names` and `path(i)`, the file of element i.

    Raises:
      UsageError: Pillow is not installed; no class, or a class without an image; when an element
        is asked for, a file that is no image of 8 bits a channel, or not of `shape`.
    """
    return ImageFolder(directory, class_names, shape)


def array_record(paths: Path | Sequence[Path], decode: Callable[[bytes], Any]) -> ArrayRecords:
    """A random-access source of the records in array_record files, one shard after the other.

    Element i is `decode(record)`, where a record is the bytes that were written. Picklable if
    `decode` is.

    Args:
      paths: a file, or several in the order that gives each record its number (a sorted glob).
      decode: makes an example, a pytree of numbers and arrays, of a record.

    Raises:
      UsageError: array_record (which comes with grain) is not installed; no file, or one that is
        damaged or without records; when an element is asked for, a record that cannot be read.

    References:
      github.com/google/array_record
    """
    return ArrayRecords(paths, decode)


# --- files ---------------------------------------------------------------------------------------


def _choose(reader: str, split: str, splits: dict[str, Any]) -> Any:
    if split not in splits:
        raise UsageError(f"{reader}: split {split!r} does not exist; use 'train' or 'test'")
    return splits[split]


def _find(directory: Path, names: Sequence[str]) -> pathlib.Path:
    for name in names:
        if (path := pathlib.Path(directory, name)).is_file():
            return path
    raise UsageError(f"there is no {' or '.join(names)} in {os.fspath(directory)}")


def _read_bytes(path: pathlib.Path, expected: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise refused(path, first_line(error), expected) from error
