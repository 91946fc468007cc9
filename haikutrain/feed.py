"""How batches reach the devices: ahead of their step, checked, with the position after them."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from haikutrain import devices, pipeline, processes
from haikutrain.data import batches_from, can_stack, count_rows, describe, is_by_step, length
from haikutrain.errors import UsageError
from haikutrain.positions import decode, encode
from haikutrain.prefetch import Prefetch, ahead

# Placing a small batch takes as long as placing several: so many go together, in so many bytes.
_GROUP, _GROUP_BYTES = 16, 1 << 20


class TrainItem(NamedTuple):
    """What one call of the update needs."""

    steps: int
    """How many steps the call takes, K."""
    placed: Any
    """On the devices: `[D, B / D, ...]`, or `[K, D, B / D, ...]` if K > 1."""
    position: Any
    """The iterator's state after this batch; None for a dataset by step."""
    group: int = 1
    """If more than 1, G: `placed` is `[G, D, B / D, ...]`, of which step s takes number s % G."""
    first: int = 0
    """The step that takes it, if it is of a group."""
    arrays: Any = None
    """If not None: the whole arrays on each device; `placed` are numbers of their rows."""

    @property
    def batch(self) -> Any:
        """On the devices: `[D, B / D, ...]`, or `[K, D, B / D, ...]` if K > 1."""
        own = self.placed
        if self.group > 1:
            own = jax.tree.map(lambda x: x[self.first % self.group], own)
        if self.arrays is None:
            return own
        return jax.tree.map(lambda x: x[np.asarray(own)], self.arrays)


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
        self._by_step = is_by_step(dataset)
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
        batches = length(self._dataset) if self._by_step else None
        if batches is not None and batches < end:
            raise UsageError(
                f"train_data has {batches} batches and the run needs {end}; make it endless "
                "(an ArrayDataset with a seed is; in grain: .repeat())"
            )

    @property
    def position(self) -> Any:
        """Where the iterator stands while no `items` are drawn; None for a dataset by step."""
        # A copy, for an iterator may hand out the very object that it goes on changing.
        return None if self._iterator is None else copy.deepcopy(self._iterator.get_state())

    def gathered(self, position: Any) -> Any:
        """This position and those of the other processes, to be saved; all processes call it."""
        if self._by_step or processes.count() == 1:
            return position
        return [
            decode(one) for one in processes.gather("positions of train_data", encode(position))
        ]

    def own(self, gathered: Any) -> Any:
        """This process's part of what `gathered` returned in a job of as many processes."""
        if self._by_step or processes.count() == 1:
            return gathered
        return gathered[processes.index()]

    @contextlib.contextmanager
    def items(
        self, plan: Iterable[tuple[int, int]], position: Any
    ) -> Iterator[Iterator[TrainItem]]:
        """The items of a run, each on the devices before its step begins.

        Args:
          plan: pairs (first step, K), one for each call of the update.
          position: the iterator's state to start from, or None to start where it is.
        """
        if can_stack(self._dataset):
            yield ahead(self._gathered(plan))
            return
        if self._by_step:
            # A transfer overlaps the step before it; a thread would only take the GIL.
            with contextlib.closing(self._by_steps(plan)) as steps:
                yield ahead(self._place(batches, None) for batches in steps)
            return
        if position is not None:
            self._iterator.set_state(position)
        with contextlib.ExitStack() as stack:
            if hasattr(self._iterator, "close"):  # Ends a pipeline's worker processes.
                stack.callback(self._iterator.close)
            pulled = (self._place(*pair) for pair in self._by_iterator(plan))
            yield stack.enter_context(contextlib.closing(Prefetch(pulled)))

    def group(self, steps: int) -> int:
        """The `TrainItem.group` of items of so many steps."""
        if steps > 1 or not can_stack(self._dataset):
            return 1
        if self._dataset.on_device:
            return _GROUP
        size = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(self.first))
        return max(1, min(_GROUP, _GROUP_BYTES // max(size, 1)))

    @functools.cached_property
    def resident(self) -> Any:
        """The arrays of a dataset that is to lie on the devices, there; else None."""
        kept = can_stack(self._dataset) and self._dataset.on_device
        return devices.place(self._dataset.arrays) if kept else None

    def _gathered(self, plan: Iterable[tuple[int, int]]) -> Iterator[TrainItem]:
        group, arrays = self.group(steps=1), self.resident
        draw = self._dataset.stacked if arrays is None else self._dataset.numbers
        number, placed = None, None
        for first, count in plan:
            if count > 1:
                stacked = devices.place_batch(draw(first, count, self._rows), stacked=True)
                yield TrainItem(count, stacked, None, arrays=arrays)
            elif group == 1:
                yield self._place([self._dataset.batch(first, self._rows)], None)
            else:
                if number != first // group:
                    number = first // group
                    drawn = draw(number * group, group, self._rows)
                    placed = devices.place_batch(drawn, stacked=True)
                yield TrainItem(1, placed, None, group, first, arrays)

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
