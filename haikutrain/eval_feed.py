"""How an evaluation split reaches the devices: whole, in order, padded to one size."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from haikutrain import devices, pipeline, processes
from haikutrain.data import batches_from, count_rows, describe, is_by_step, length
from haikutrain.errors import UsageError
from haikutrain.positions import decode, encode
from haikutrain.prefetch import ahead


class EvalItem(NamedTuple):
    """One evaluation batch, on the devices."""

    batch: Any
    """`[D, B / D, ...]`, padded to full size by repeating a real row."""
    mask: Any
    """bool `[D, B / D]`, False for padding."""
    index: Any
    """int32 `[D, 1]`: the batch's number, on each device."""
    padded: bool
    """Whether there is padding on this process."""


class EvalFeed:
    """An evaluation split as the loop wants it: whole, in order, padded to one size.

    Args:
      dataset: finite: by step with a length, or any iterable of this process's batches that can
        be iterated anew.
      split: its name, for errors.
      batch_size: the rows of a global batch of a dataset that does not say its own.

    Raises:
      UsageError: the dataset has no end, is empty, or is an iterator (usable once).
    """

    def __init__(self, dataset: Any, split: str, batch_size: int):
        self._dataset = dataset = pipeline.adapt(dataset, batch_size)
        self._source = f"eval_data ({split!r})"
        self._size = getattr(dataset, "batch_size", batch_size)
        self._length = length(dataset)
        self._by_step = is_by_step(dataset)
        if self._by_step:
            if self._length is None:
                raise UsageError(
                    f"{self._source} has no end; give it a length (an ArrayDataset without a seed "
                    "has one)"
                )
        elif not hasattr(dataset, "__iter__") or iter(dataset) is iter(dataset):
            raise UsageError(
                f"{self._source} is a {type(dataset).__name__}, which cannot be iterated anew for "
                "each evaluation; return a dataset, or a list of batches"
            )
        self.endless = not self._by_step and processes.count() > 1
        """Whether `items` goes on, without a row, until all processes have come to an end."""
        self._like, self._full = self._agreed(self._first())
        batch, mask = self._padded(self._like)
        self.shapes = self._place(batch, mask, 0)
        """An item like those of `items`."""
        padded = self.shapes.padded or self._ends_ragged()
        self.padded = any(processes.gather(f"padding of {self._source}", padded))
        """Whether some batch is padded, as far as can be known without going through all."""

    def _first(self) -> Any:
        if not self._by_step:
            return next(iter(self._dataset), None)
        rows = devices.local_rows(-(-self._size // devices.device_count()) * devices.device_count())
        self._rows = slice(rows.start, min(rows.stop, self._size))
        return self._dataset.batch(0, self._rows) if self._length else None

    def _agreed(self, first: Any) -> tuple[Any, int]:
        """A first batch (without rows, where only others have one) and the rows of a full one.

        Raises:
          UsageError: there are no batches, or they look otherwise in other processes.
        """
        rows = None if first is None else self._full_rows(count_rows(first, self._source))
        look = None if first is None else describe(first)
        found = processes.gather(f"first batch of {self._source}", [rows, look])
        known: list[Any] = [pair for pair in found if pair[0] is not None]
        if not known:
            raise UsageError(f"{self._source} is empty")
        for _, other in known:
            if look is not None and other != look:
                raise UsageError(
                    f"{self._source} gives {look} in process {processes.index()} and {other} in "
                    "another one; all need the same names, shapes and dtypes"
                )
        if len(known) < len(found):
            empty = (
                None if first is None else jax.tree.map(lambda leaf: np.asarray(leaf)[:0], first)
            )
            likes = processes.gather(f"look of {self._source}", encode(empty))
            first = next(decode(like) for like in likes if like is not None) if not rows else first
        return first, max(rows for rows, _ in known)

    def _ends_ragged(self) -> bool:
        if not self._by_step or not self._length:
            return False
        last = self._dataset.batch(self._length - 1, self._rows)
        return count_rows(last, self._source) < self._full

    def items(self) -> Iterator[EvalItem]:
        """All batches, each on the devices before it is asked for. See `endless`."""
        batches = self._batches()
        pairs = enumerate(
            self._without_end(batches) if self.endless else map(self._padded, batches)
        )
        return ahead(self._place(batch, mask, index) for index, (batch, mask) in pairs)

    def _full_rows(self, first: int) -> int:
        """The rows that each batch of this process is padded to."""
        local = jax.local_device_count()
        if self._by_step:
            return -(-self._size // devices.device_count()) * local
        return -(-first // local) * local

    def _batches(self) -> Iterator[Any]:
        if not self._by_step:
            yield from self._dataset
            return
        with batches_from(self._dataset, 0, self._rows) as batches:
            yield from itertools.islice(batches, self._length)

    def _without_end(self, batches: Iterable[Any]) -> Iterator[tuple[Any, np.ndarray]]:
        """The batches, and then one again and again of which no row counts."""
        batch, mask = self._padded(self._like)
        for one in batches:
            # Without rows anywhere, a batch means the end.
            if count_rows(one, self._source):
                batch, mask = self._padded(one)
                yield batch, mask
        while True:
            yield batch, np.zeros_like(mask)

    def _padded(self, batch: Any) -> tuple[Any, np.ndarray]:
        rows = count_rows(batch, self._source)
        if rows > self._full:
            raise UsageError(
                f"{self._source} gave a batch of {rows} rows after one of {self._full}; the first "
                "batch must be the largest"
            )
        mask = np.arange(self._full) < rows
        if rows == self._full:
            return batch, mask

        def pad(leaf: Any) -> np.ndarray:
            leaf = np.asarray(leaf)
            # A row of zeros could be NaN in the network; a real one cannot be worse than its data.
            filler = leaf[:1] if rows else np.zeros((1, *leaf.shape[1:]), leaf.dtype)
            return np.concatenate([leaf, filler.repeat(self._full - rows, axis=0)])

        return jax.tree.map(pad, batch), mask

    def _place(self, batch: Any, mask: np.ndarray, index: int) -> EvalItem:
        indices = np.full(jax.local_device_count(), index, np.int32)
        placed = devices.place_batch((batch, mask, indices))
        return EvalItem(placed[0], placed[1], placed[2], padded=bool(mask.any() and not mask.all()))
