"""Datasets: the two protocols, arrays in memory, and the data set that travels along.

A dataset answers one of two protocols.

By step: `batch(step, rows)` returns the rows `rows` (a slice) of global batch number `step`, a
pure function. `batch_size` is the rows of a full batch (default: the config's); `len()` the number
of batches of a finite one. There is nothing to save and any step can be had at once. Where a batch
takes long to make, a generator `batches(first, rows)` gives batches `first`, `first` + 1, ... and
makes them ahead.

By iterator: iterating yields this process's rows of one global batch after the other; the iterator
has `get_state()` and `set_state(state)`, where the state is plain data, bytes or arrays. For
evaluation any iterable of batches will do.

A batch is a pytree of arrays with equal leading size. It belongs to the framework once given: a
dataset never overwrites a buffer that it has yielded.
"""

import contextlib
import functools
import importlib.resources
import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from haikutrain.errors import UsageError
from haikutrain.leaves import by_path


class ArrayDataset:
    """Batches of arrays in memory, by step.

    With a seed: shuffled anew in each epoch, without end; batch number s holds positions s·B to
    (s+1)·B-1 of the endless row of shuffled epochs, so that nothing is dropped. Without: in order
    and once, the last batch as small as it comes.

    Args:
      arrays: a pytree of arrays `[N, ...]`; 64-bit ones are converted to JAX's default width.
      batch_size: the rows of a global batch, B.
      seed: of the order, or None.
      on_device: training keeps the arrays on each device, all of them, and sends only the numbers
        of the rows. The batches are the same. It pays for small arrays and tiny networks with
        `config.steps_per_call`; it needs a seed.

    Raises:
      UsageError: no rows, unequal leading sizes, values that JAX has no dtype for, or `on_device`
        without a seed.
    """

    def __init__(
        self, arrays: Any, batch_size: int, seed: int | None = None, *, on_device: bool = False
    ):
        if batch_size < 1:
            raise UsageError(f"ArrayDataset: batch_size is {batch_size}; it must be >= 1")
        if on_device and seed is None:
            raise UsageError("ArrayDataset: on_device=True is for training, which needs a seed")
        arrays = jax.tree_util.tree_map_with_path(_as_array, arrays)
        sizes = {path: leaf.shape[0] for path, leaf in by_path(arrays).items()}
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise UsageError(f"ArrayDataset: arrays need one equal leading size > 0, got {sizes}")
        # Flat, for `jax.tree.map` takes longer than slicing a small batch.
        self._leaves: list[np.ndarray] = jax.tree.leaves(arrays)
        self._unflatten = functools.partial(jax.tree.unflatten, jax.tree.structure(arrays))
        self.num_examples: int = next(iter(sizes.values()))
        self.batch_size = batch_size
        self.seed = seed
        self.on_device = on_device
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        """The number of batches; raises TypeError for a shuffled, endless dataset."""
        if self.seed is not None:
            raise TypeError("a shuffled ArrayDataset has no end")
        return math.ceil(self.num_examples / self.batch_size)

    def batch(self, step: int, rows: slice = slice(None)) -> Any:
        """The rows `rows` of global batch `step`: arrays `[B, ...]` or fewer."""
        begin, end, _ = rows.indices(self.batch_size)
        first = step * self.batch_size
        if self.seed is None:
            last = min(first + end, self.num_examples)
            return self._unflatten([a[first + begin : last] for a in self._leaves])
        index = self._positions(first + begin, first + end)
        return self._unflatten([a.take(index, axis=0) for a in self._leaves])

    def stacked(self, step: int, count: int, rows: slice = slice(None)) -> Any:
        """The rows `rows` of `count` global batches from `step` on: arrays `[count, B, ...]`.

        One gather for all, which takes much less time than one for each small batch.

        Raises:
          ValueError: the dataset is not shuffled: its last batch may be smaller.
        """
        index = self.numbers(step, count, rows)
        return self._unflatten([a.take(index, axis=0) for a in self._leaves])

    def numbers(self, step: int, count: int, rows: slice = slice(None)) -> np.ndarray:
        """Which rows of `arrays` those of `stacked` are: int32 `[count, B]`. Raises as it does."""
        if self.seed is None:
            raise ValueError("batches of unequal sizes cannot be stacked: only of shuffled data")
        index = self._positions(step * self.batch_size, (step + count) * self.batch_size)
        return index.reshape(count, self.batch_size)[:, rows].astype(np.int32)

    @property
    def arrays(self) -> Any:
        """What it was made of, `[N, ...]`."""
        return self._unflatten(self._leaves)

    def _positions(self, begin: int, end: int) -> np.ndarray:
        """Row indices at positions [begin, end) of the endless row of epochs."""
        epoch, offset = divmod(begin, self.num_examples)
        if offset + end - begin <= self.num_examples:
            return self._epoch(epoch)[offset : offset + end - begin]
        parts: list[np.ndarray] = []
        while begin < end:
            epoch, offset = divmod(begin, self.num_examples)
            size = max(0, min(end - begin, self.num_examples - offset))
            parts.append(self._epoch(epoch)[offset : offset + size])
            begin += size
        return np.concatenate(parts)

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed or 0, epoch]).permutation(self.num_examples)


def _as_array(path: Any, leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    # ml_dtypes' bfloat16 and the like are of NumPy's kind V.
    numeric = array.dtype.kind in "biufc" or "float" in array.dtype.name
    if array.ndim == 0 or not numeric:
        raise UsageError(
            f"ArrayDataset: {name!r} has dtype {array.dtype} and shape {array.shape}; give numeric "
            "arrays with one row an example"
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    narrow = array.astype(dtype, copy=False)
    if array.dtype.kind in "iu" and narrow is not array and not np.array_equal(narrow, array):
        raise UsageError(f"ArrayDataset: {name!r} has values too large for {dtype}")
    own = np.ascontiguousarray(narrow).view()
    # Unshuffled batches are views: who writes into one must not change the next epoch.
    own.flags.writeable = False
    return own


def digits(split: str) -> dict[str, np.ndarray]:
    """The data set that travels with haikutrain: 8x8 pictures of handwritten digits.

    Args:
      split: "train" (1437 examples) or "test" (360 held-out ones).

    Returns:
      `image`: float32 `[N, 8, 8, 1]` in [0, 1]; `label`: int32 `[N]` in 0..9.

    References:
      E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 (CC BY 4.0),
      as scikit-learn ships it.
    """
    if split not in ("train", "test"):
        raise UsageError(f"digits: split {split!r} does not exist; use 'train' or 'test'")
    with (importlib.resources.files("haikutrain") / "digits.npz").open("rb") as file:
        arrays = np.load(file)
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    return {
        "image": images[..., None].astype(np.float32) / 16,
        "label": labels.astype(np.int32),
    }


def length(dataset: Any) -> int | None:
    """The batches of a dataset, or None if it has no end."""
    try:
        return len(dataset)
    except TypeError:
        return None


def is_by_step(dataset: Any) -> bool:
    """Whether it has `batch(step, rows)`; grain's `batch(batch_size)` is something else."""
    try:
        inspect.signature(dataset.batch).bind(0, slice(0))
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def can_stack(dataset: Any) -> bool:
    """Whether several batches can be had at once by `ArrayDataset.stacked`.

    Not of a subclass that makes something else of a batch.
    """
    return (
        isinstance(dataset, ArrayDataset)
        and dataset.seed is not None
        and type(dataset).batch is ArrayDataset.batch
        and not hasattr(dataset, "batches")
    )


@contextlib.contextmanager
def batches_from(dataset: Any, first: int, rows: slice) -> Iterator[Iterator[Any]]:
    """The rows `rows` of batches `first`, `first` + 1, ... of a dataset by step."""
    if hasattr(dataset, "batches"):
        with contextlib.closing(dataset.batches(first, rows)) as batches:
            yield batches
    else:
        yield (dataset.batch(step, rows) for step in itertools.count(first))


def describe(batch: Any) -> dict[str, str]:
    """Shape and dtype of one row of each array of a batch: `{"image": "float32[8, 8, 1]"}`."""
    return {
        path: f"{jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)}{list(np.shape(x)[1:])}"
        for path, x in by_path(batch).items()
    }


def count_rows(batch: Any, source: str) -> int:
    """The leading size of a batch; raises UsageError naming `source` if its arrays disagree."""
    for path, leaf in by_path(batch).items():
        if (dtype := np.asarray(leaf).dtype).kind in "OUSMm":
            raise UsageError(f"{source} gave {path!r} of dtype {dtype}; batches are of numbers")
    sizes = {path: np.shape(leaf)[:1] for path, leaf in by_path(batch).items()}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        found = {path: size[0] if size else "a scalar" for path, size in sizes.items()}
        raise UsageError(f"{source} gave a batch whose arrays differ in leading size: {found}")
    return next(iter(sizes.values()))[0]
