"""grain as the input pipeline: a `MapDataset` becomes batches by step, made in worker processes.

The one door to grain.

Element i of a `MapDataset` is a function of i alone. So batch s is made of elements s·B to
(s+1)·B-1 whatever the number of devices, processes and workers: there is no position to save, and
each process makes its own rows of the one global order. A batch is made in parts, by the workers
in turn; they work ahead and decide nothing.
"""

import contextlib
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from absl import flags

from haikutrain.errors import UsageError
from haikutrain.leaves import by_path

# Threads that make the parts of a batch where there are no worker processes.
_THREADS = 8
# A repeated dataset says that it has about 2**63 elements.
_ENDLESS = 2**40


class GrainDataset:
    """Batches by step of a `grain.MapDataset`, made ahead in worker processes.

    A bare `MapDataset` that `train_data` or `eval_data` returns is taken as
    `GrainDataset(dataset, config.batch_size)`.

    Worker processes start anew with each start and each evaluation, which takes seconds. They get
    the dataset pickled (what a config file defines may be in it), ignore Ctrl-C and SIGTERM, end
    with this process, and see no accelerator. A script that trains with them needs
    `if __name__ == "__main__":` around what it runs.

    Args:
      dataset: of examples (pytrees of numbers and arrays, each of one shape), which are stacked
        here; or of global batches, where grain's `.batch(B)` has made them, and each process then
        makes whole batches to take its rows. Endless for training (`.repeat()` before `.batch`),
        finite for evaluation.
      batch_size: the rows of a global batch, B.
      num_workers: worker processes; 0 for threads of this process.

    Attributes:
      num_examples: how many there are in its sources.

    Raises:
      UsageError: not a `MapDataset`, an empty one, or one with a `filter`, which leaves gaps. Also
        where a batch is made: examples that do not fit together, batches of another size.
    """

    def __init__(self, dataset: Any, batch_size: int, *, num_workers: int = 0):
        if not _is_grain(dataset, "MapDataset"):
            raise UsageError(
                f"GrainDataset takes a grain.MapDataset, not a {type(dataset).__name__}; a "
                "grain.IterDataset can be returned from train_data as it is"
            )
        if batch_size < 1 or num_workers < 0:
            raise UsageError(
                f"GrainDataset: batch_size is {batch_size} and num_workers {num_workers}; they "
                "must be >= 1 and >= 0"
            )
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.num_examples = _examples(dataset)
        self._dataset = dataset
        self._batched = any(isinstance(node, _batch_class()) for node in _nodes(dataset))
        if len(dataset) == 0:
            raise UsageError("the grain.MapDataset is empty")
        if not self._batched:
            _refuse_gaps(dataset)

    def __len__(self) -> int:
        """The number of batches; raises TypeError for an endless dataset."""
        elements = len(self._dataset)
        if elements > _ENDLESS:
            raise TypeError("a repeated MapDataset has no end")
        return elements if self._batched else math.ceil(elements / self.batch_size)

    def batch(self, step: int, rows: slice = slice(None)) -> Any:
        """The rows `rows` of global batch `step`, made now, in threads of this process."""
        return next(self._stream(step, step + 1, rows, num_workers=0))

    def batches(self, first: int, rows: slice = slice(None)) -> Iterator[Any]:
        """The rows `rows` of batches `first`, `first` + 1, ..., made ahead; to be closed."""
        elements = len(self._dataset)
        last = sys.maxsize if elements > _ENDLESS else len(self)
        return self._stream(first, last, rows, self.num_workers)

    def _stream(self, first: int, last: int, rows: slice, num_workers: int) -> Iterator[Any]:
        import grain

        parts = _Parts(self._dataset, self._batched, self.batch_size, rows, first, last)
        parts.divide(num_workers or _THREADS)
        # A worker has its queue, and one thread, to be ahead; a thread pool needs a buffer.
        ahead = (0, 0) if num_workers else (_THREADS, 2 * parts.count)
        made = grain.MapDataset.source(parts).to_iter_dataset(grain.ReadOptions(*ahead))
        if num_workers:
            if not flags.FLAGS.is_parsed():  # In a notebook; grain reads its own flags.
                flags.FLAGS.mark_as_parsed()
            options = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=1)
            made = made.mp_prefetch(options, worker_init_fn=_begin_worker)
        with contextlib.closing(iter(made)) as iterator:
            while batch := list(itertools.islice(iterator, parts.count)):
                # Always a copy: what a worker has sent lies in memory that goes back to it.
                yield jax.tree.map(lambda *part: np.concatenate(part), *batch)


class _Parts:
    """What the workers run: random access to the parts of batches `first` to `last` - 1."""

    def __init__(
        self, dataset: Any, batched: bool, batch_size: int, rows: slice, first: int, last: int
    ):
        self._dataset = dataset
        self._batched = batched
        self._batch_size = batch_size
        self._begin, self._end, _ = rows.indices(batch_size)
        self._first = first
        self._last = last
        self._elements = len(dataset)
        self.count = 1

    def divide(self, workers: int) -> None:
        """Cuts each batch into so many parts, if it can be."""
        self.count = 1 if self._batched else max(1, min(workers, self._end - self._begin))

    def __len__(self) -> int:
        return min((self._last - self._first) * self.count, sys.maxsize)

    def __getitem__(self, index: int) -> Any:
        batch, part = divmod(index, self.count)
        batch += self._first
        if self._batched:
            return self._cut(batch)
        rows = self._end - self._begin
        start = batch * self._batch_size + self._begin
        begin, end = start + rows * part // self.count, start + rows * (part + 1) // self.count
        indices = range(begin, min(end, self._elements))
        if indices:
            return _stacked([self._dataset[i] for i in indices], begin)
        # The last batch has no rows for this process, but they have a shape.
        return jax.tree.map(lambda leaf: leaf[:0], _stacked([self._dataset[0]], 0))

    def _cut(self, batch: int) -> Any:
        whole = jax.tree.map(np.asarray, self._dataset[batch])
        sizes = {leaf.shape[:1] for leaf in jax.tree.leaves(whole)}
        smaller = batch == self._elements - 1 and max(sizes) < (self._batch_size,)
        if sizes != {(self._batch_size,)} and not (smaller and len(sizes) == 1):
            found = {path: leaf.shape[:1] for path, leaf in by_path(whole).items()}
            raise UsageError(
                f"batch {batch} of the grain.MapDataset has leading sizes {found}, and batch_size "
                f"is {self._batch_size}; end it in .repeat().batch({self._batch_size}), or give it "
                "without .batch"
            )
        return jax.tree.map(lambda leaf: leaf[self._begin : self._end], whole)


def _stacked(examples: list[Any], first: int) -> Any:
    """Examples `first`, `first` + 1, ... as one pytree of arrays `[n, ...]`."""
    rows = [jax.tree.flatten(example) for example in examples]
    columns = list(zip(*[map(np.asarray, leaves) for leaves, _ in rows], strict=False))
    same = all(row == rows[0][1] for _, row in rows) and all(
        leaf.shape == column[0].shape and leaf.dtype == column[0].dtype
        for column in columns
        for leaf in column
    )
    numeric = all(column[0].dtype.kind in "biufcV" for column in columns)
    if not (same and numeric and columns):
        _refuse(examples, first)
    return jax.tree.unflatten(rows[0][1], [np.stack(column) for column in columns])


def _refuse(examples: list[Any], first: int) -> NoReturn:
    looks = [
        {path: f"{x.dtype}{list(x.shape)}" for path, x in _arrays(example).items()} or repr(example)
        for example in examples
    ]
    for number, (example, look) in enumerate(zip(examples, looks, strict=True), first):
        for path, array in _arrays(example).items():
            if array.dtype.kind not in "biufcV":
                raise UsageError(
                    f"example {number} of the grain.MapDataset has {array.dtype} at {path!r}; "
                    "map it to numbers, or leave it out"
                )
        if not isinstance(look, dict) or look != looks[0]:
            raise UsageError(
                f"example {number} of the grain.MapDataset is {look}, and example {first} is "
                f"{looks[0]}; map them all to the same names, shapes and dtypes"
            )
    raise UsageError(f"examples of the grain.MapDataset have another structure from {first} on")


def _arrays(example: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in by_path(example).items()}


def _begin_worker(index: int, count: int) -> None:
    """Runs in a worker process before it works."""
    # They go to all processes of a terminal or a job, and the run may want batches until it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A transformation that uses JAX must not take memory of the accelerator that trains.
    jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# --- looking into a pipeline ---------------------------------------------------------------------


def adapt(dataset: Any, batch_size: int) -> Any:
    """A `GrainDataset` for a bare `MapDataset`; anything else as it is."""
    return GrainDataset(dataset, batch_size) if _is_grain(dataset, "MapDataset") else dataset


def describe(dataset: Any) -> dict[str, Any]:
    """What a resume must find again of a pipeline of grain's, as plain data; else nothing."""
    if isinstance(dataset, GrainDataset):
        return {"seed": _seeds(dataset._dataset), "workers": dataset.num_workers}
    if not _is_grain(dataset, "IterDataset"):
        return {}
    workers = sum(type(node).__name__ == "ProcessPrefetchIterDataset" for node in _nodes(dataset))
    return {"examples": _examples(dataset), "seed": _seeds(dataset), "workers": workers}


def _is_grain(dataset: Any, kind: str) -> bool:
    # Who has such a dataset has imported grain: nobody else should pay for it.
    return "grain" in sys.modules and isinstance(dataset, getattr(sys.modules["grain"], kind))


def _nodes(dataset: Any) -> Iterator[Any]:
    """The dataset and all that it is made from, nearest first, each once."""
    nodes, seen = [dataset], set()
    for node in nodes:
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            nodes.extend(node.parents or getattr(node, "_datasets", ()))  # Of mp_prefetch.


def _batch_class() -> type:
    import grain

    return type(grain.MapDataset.range(1).batch(1))


def _refuse_gaps(dataset: Any) -> None:
    try:
        dataset.batch(1)  # grain's own rule: what may leave elements out cannot be batched.
    except ValueError as error:
        raise UsageError(
            "the grain.MapDataset leaves elements out (a filter, a flat map), so that its batches "
            "are not known by number; leave them out of the source, or end it in "
            ".to_iter_dataset().batch(B)"
        ) from error


def _examples(dataset: Any) -> int:
    sources = [node for node in _nodes(dataset) if not node.parents and hasattr(node, "__len__")]
    return sum(map(len, sources))


def _seeds(dataset: Any) -> list[int]:
    """Every seed in it. grain has no public name for them: a test holds where they are."""
    return [
        int(getattr(owner, name))
        for node in _nodes(dataset)
        for owner in (node, getattr(node, "_rng_pool", None))
        for name in ("_seed_rng_seed", "_seed")
        if getattr(owner, name, None) is not None
    ]
