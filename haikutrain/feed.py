"""How batches reach the devices: ahead of their step, checked, with the position after them."""

import collections
import contextlib
import copy
import inspect
import itertools
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from haikutrain import devices, pipeline
from haikutrain.data import batches_from, count_rows, describe
from haikutrain.errors import UsageError


class TrainItem(NamedTuple):
    """What one call of the update needs."""

    steps: int
    """How many steps the call takes, K."""
    batch: Any
    """On the devices: `[D, B / D, ...]`, or `[K, D, B / D, ...]` if K > 1."""
    position: Any
    """The iterator's state after this batch; None for a dataset by step."""


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


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _is_by_step(dataset: Any) -> bool:
    """Whether it has `batch(step, rows)`; grain's `batch(batch_size)` is something else."""
    try:
        inspect.signature(dataset.batch).bind(0, slice(0))
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _number(dataset: Any, name: str) -> int | None:
    value = getattr(dataset, name, None)
    return value if isinstance(value, int) else None  # In grain, `seed` is a method.


def _signature(batch: Any) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, [(np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves]


class TrainFeed:
    """A training dataset as the loop wants it.

    Args:
      dataset: of either protocol.
      batch_size: the rows of a global batch.

    Raises:
      UsageError: the dataset answers neither protocol, cannot say its position, or its batches
        have another size.
    """

    def __init__(self, dataset: Any, batch_size: int):
        self._dataset = dataset = pipeline.adapt(dataset, batch_size)
        self._batch_size = batch_size
        self._rows = devices.local_rows(batch_size)
        self._by_step = _is_by_step(dataset)
        own = getattr(dataset, "batch_size", batch_size)
        if own != batch_size:
            raise UsageError(
                f"train_data has batch_size {own} and the config {batch_size}; make them equal"
            )
        self._iterator: Any = None if self._by_step else _resumable(dataset)
        self.first = self._first()
        """The first batch, on the host, not consumed: what init looks at. `[B / processes, ...]`"""
        self._signature = _signature(self.first)

    def _first(self) -> Any:
        if self._by_step:
            first = self._dataset.batch(0, self._rows)
        else:
            start = self.position
            first = next(self._iterator, None)
            self._iterator.set_state(start)
            if first is None:
                raise UsageError("train_data is empty")
        rows, expected = count_rows(first, "train_data"), self._rows.stop - self._rows.start
        if rows != expected:
            raise UsageError(
                f"train_data gave a batch of {rows} rows; batch_size={self._batch_size} asks "
                f"for {expected} on this process"
            )
        return first

    def fingerprint(self) -> dict[str, Any]:
        """What must not change between a run and its resume, as plain data."""
        return {
            "protocol": "by step" if self._by_step else "by iterator",
            "batch_size": self._batch_size,
            "examples": _number(self._dataset, "num_examples"),
            "seed": _number(self._dataset, "seed"),
            "row": describe(self.first),
            **({} if self._by_step else {"processes": jax.process_count()}),
            **pipeline.describe(self._dataset),
        }

    def check_length(self, end: int) -> None:
        """Raises UsageError if a finite dataset by step ends before step `end`."""
        length = _length(self._dataset) if self._by_step else None
        if length is not None and length < end:
            raise UsageError(
                f"train_data has {length} batches and the run needs {end}; make it endless "
                "(an ArrayDataset with a seed is; in grain: .repeat())"
            )

    @property
    def position(self) -> Any:
        """Where the iterator stands while no `items` are drawn; None for a dataset by step."""
        # A copy, for an iterator may hand out the very object that it goes on changing.
        return None if self._iterator is None else copy.deepcopy(self._iterator.get_state())

    @contextlib.contextmanager
    def items(
        self, plan: Iterable[tuple[int, int]], position: Any
    ) -> Iterator[Iterator[TrainItem]]:
        """The items of a run, each on the devices before its step begins.

        Args:
          plan: pairs (first step, K), one for each call of the update.
          position: the iterator's state to start from, or None to start where it is.
        """
        if self._by_step:
            # A transfer overlaps the step before it; a thread would only take the GIL.
            with contextlib.closing(self._by_steps(plan)) as steps:
                yield _ahead(self._place(batches, None) for batches in steps)
            return
        if position is not None:
            self._iterator.set_state(position)
        with contextlib.ExitStack() as stack:
            if hasattr(self._iterator, "close"):  # Ends a pipeline's worker processes.
                stack.callback(self._iterator.close)
            pulled = (self._place(*pair) for pair in self._by_iterator(plan))
            yield stack.enter_context(contextlib.closing(_Prefetch(pulled)))

    def _by_steps(self, plan: Iterable[tuple[int, int]]) -> Generator[list[Any], None, None]:
        with contextlib.ExitStack() as stack:
            made = None
            for first, count in plan:
                made = made or stack.enter_context(batches_from(self._dataset, first, self._rows))
                yield [self._checked(next(made), first + i) for i in range(count)]

    def _by_iterator(self, plan: Iterable[tuple[int, int]]) -> Iterator[tuple[list[Any], Any]]:
        for first, count in plan:
            drawn = list(itertools.islice(self._iterator, count))
            if len(drawn) < count:
                raise UsageError(
                    f"train_data ended after {first + len(drawn)} batches; make it repeat "
                    "(in grain: .repeat())"
                )
            batches = [self._checked(batch, first + i) for i, batch in enumerate(drawn)]
            yield batches, self.position

    def _checked(self, batch: Any, step: int) -> Any:
        if _signature(batch) != self._signature:
            raise UsageError(
                f"train_data gave {count_rows(batch, 'train_data')} rows of {describe(batch)} at "
                f"step {step}, and at first {count_rows(self.first, 'train_data')} of "
                f"{describe(self.first)}; all batches need the same shapes and dtypes"
            )
        return batch

    def _place(self, batches: list[Any], position: Any) -> TrainItem:
        count = len(batches)
        batch = batches[0] if count == 1 else jax.tree.map(lambda *x: np.stack(x), *batches)
        return TrainItem(count, devices.place_batch(batch, stacked=count > 1), position)


def _resumable(dataset: Any) -> Any:
    if not hasattr(dataset, "__iter__"):
        raise UsageError(
            f"train_data returned a {type(dataset).__name__}; a dataset has batch(step, rows) or "
            "can be iterated"
        )
    iterator = iter(dataset)
    if not (hasattr(iterator, "get_state") and hasattr(iterator, "set_state")):
        raise UsageError(
            f"train_data's iterator, a {type(iterator).__name__}, has no get_state and set_state, "
            "so a resumed run could not go on where it was; use ArrayDataset, grain, or an "
            "iterator that says its position"
        )
    pipeline.begin(iterator)
    return iterator


def _ahead(items: Iterable[Any]) -> Iterator[Any]:
    """Makes each item one turn before it is asked for."""
    waiting: collections.deque[Any] = collections.deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.popleft()
    yield from waiting


class _Prefetch:
    """Makes items in a thread, two ahead: an iterator's `next` may take as long as a step."""

    def __init__(self, items: Iterator[Any]):
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
        self._free = threading.Semaphore(2)
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(items,), daemon=True)
        self._thread.start()

    def _run(self, items: Iterator[Any]) -> None:
        try:
            while self._free.acquire() and not self._closed:
                self._queue.put((next(items), None))
        except BaseException as error:  # Raised again where the items are used.
            self._queue.put((None, error))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item, error = self._queue.get()
        if error is not None:
            self._queue.put((None, error))
            raise error
        self._free.release()
        return item

    def close(self) -> None:
        """Ends the thread after the item that it is making."""
        self._closed = True
        self._free.release()
        self._thread.join()


# --- evaluation ------------------------------------------------------------------------------


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
        self._length = _length(dataset)
        self._by_step = _is_by_step(dataset)
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
        first = self._first()
        if first is None:
            raise UsageError(f"{self._source} is empty")
        self._full = self._full_rows(count_rows(first, self._source))
        batch, mask = self._padded(first)
        self.shapes = self._place(batch, mask, 0)
        """An item like those of `items`."""

    def _first(self) -> Any:
        if not self._by_step:
            return next(iter(self._dataset), None)
        rows = devices.local_rows(-(-self._size // devices.device_count()) * devices.device_count())
        self._rows = slice(rows.start, min(rows.stop, self._size))
        return self._dataset.batch(0, self._rows) if self._length else None

    def items(self) -> Iterator[EvalItem]:
        """All batches, each on the devices before it is asked for."""
        pairs = enumerate(map(self._padded, self._batches()))
        return _ahead(self._place(batch, mask, index) for index, (batch, mask) in pairs)

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
        return EvalItem(placed[0], placed[1], placed[2], padded=not mask.all())
