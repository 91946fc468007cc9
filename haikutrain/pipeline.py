"""grain as the input pipeline: a `MapDataset` becomes batches by step, made in worker processes.

The one door to grain.

Element i of a `MapDataset` is a function of i alone. So batch s is made of elements s·B to
(s+1)·B-1 whatever the number of devices, processes and workers: there is no position to save, and
each process makes its own rows of the one global order. A batch is made in parts, by the workers
in turn; they work ahead and decide nothing.
"""

import atexit
import contextlib
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
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
        own = _own_batch_size(dataset)
        self._batched = own is not None
        if len(dataset) == 0:
            raise UsageError("the grain.MapDataset is empty")
        if own is None:
            _refuse_gaps(dataset)
        elif own != batch_size:
            raise UsageError(
                f"the grain.MapDataset has batches of {own} and batch_size is {batch_size}; make "
                "them equal, or leave .batch out"
            )

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

        parts = _Parts(self, rows, range(first, last), num_workers or _THREADS)
        # A worker has its queue, and one thread, to be ahead; a thread pool needs a buffer.
        ahead = (0, 0) if num_workers else (_THREADS, 2 * parts.count)
        made = grain.MapDataset.source(parts).to_iter_dataset(grain.ReadOptions(*ahead))
        if num_workers:
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                raise UsageError(
                    "a worker process of GrainDataset has begun to train by itself; put "
                    'if __name__ == "__main__": around what the script runs'
                )
            _parse_flags()
            # Through pipes: shared memory is 64 MB in many a container, and a worker that finds
            # it full dies.
            options = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            made = grain.experimental.WithOptionsIterDataset(made, options).mp_prefetch(
                grain.MultiprocessingOptions(num_workers), worker_init_fn=_begin_worker
            )
        with contextlib.closing(iter(made)) as iterator:
            while batch := list(itertools.islice(iterator, parts.count)):
                yield _joined(batch)


class _Parts:
    """What the workers run: random access to the parts of batches, each with its first row."""

    def __init__(self, dataset: GrainDataset, rows: slice, batches: range, workers: int):
        self._dataset = dataset._dataset
        self._batched = dataset._batched
        self._batch_size = dataset.batch_size
        self._begin, self._end, _ = rows.indices(dataset.batch_size)
        self._batches = batches
        self._elements = len(self._dataset)
        self.count = 1 if self._batched else max(1, min(workers, self._end - self._begin))
        """The parts of a batch."""

    def __len__(self) -> int:
        return min(len(self._batches) * self.count, sys.maxsize)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        batch, part = divmod(index, self.count)
        batch = self._batches[batch]
        start = batch * self._batch_size + self._begin
        if self._batched:
            return start, self._cut(batch)
        rows = self._end - self._begin
        begin, end = start + rows * part // self.count, start + rows * (part + 1) // self.count
        numbers = range(begin, min(end, self._elements))
        if numbers:
            return begin, _stacked({number: self._dataset[number] for number in numbers})
        # The last batch has no rows for this process, but they have a shape.
        return 0, jax.tree.map(lambda leaf: leaf[:0], _stacked({0: self._dataset[0]}))

    def _cut(self, batch: int) -> Any:
        whole = jax.tree.map(np.asarray, self._dataset[batch])
        sizes = {leaf.shape[:1] for leaf in jax.tree.leaves(whole)}
        # The last batch of a finite dataset may be smaller; who repeats one repeats that as well.
        if sizes != {(self._batch_size,)} and (len(sizes) != 1 or batch != self._elements - 1):
            found = {path: x.shape[0] if x.ndim else None for path, x in by_path(whole).items()}
            raise UsageError(
                f"batch {batch} of the grain.MapDataset has leading sizes {found}, and batch_size "
                f"is {self._batch_size}; end it in .repeat().batch({self._batch_size}), or leave "
                ".batch out"
            )
        return jax.tree.map(lambda leaf: leaf[self._begin : self._end], whole)


def _stacked(examples: dict[int, Any]) -> Any:
    """Examples, under their numbers, as one pytree of arrays `[n, ...]`."""
    kinds = [_kind(example) for example in examples.values()]
    numeric = all(dtype.kind in "biufcV" for _, dtype in kinds[0][1])  # V: bfloat16.
    if not numeric or not kinds[0][1] or kinds.count(kinds[0]) < len(kinds):
        _refuse({number: _look(example) for number, example in examples.items()})
    return jax.tree.map(lambda *leaves: np.stack(leaves), *examples.values())


def _joined(parts: list[tuple[int, Any]]) -> Any:
    """The parts of a batch as one: `[n, ...]`."""
    trees = [tree for _, tree in parts]
    kinds = [_kind(tree, skip=1) for tree in trees]
    if kinds.count(kinds[0]) < len(kinds):
        _refuse({number: _look(tree, skip=1) for number, tree in parts})
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *trees)


def _kind(tree: Any, skip: int = 0) -> tuple[Any, list[tuple[tuple[int, ...], np.dtype]]]:
    """What must be equal in all examples; `skip` leading axes may differ."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(np.shape(leaf)[skip:], np.asarray(leaf).dtype) for leaf in leaves]


def _look(tree: Any, skip: int = 0) -> Any:
    arrays = {path: np.asarray(leaf) for path, leaf in by_path(tree).items()}
    return {path: f"{x.dtype}{list(x.shape[skip:])}" for path, x in arrays.items()} or repr(tree)


def _refuse(looks: dict[int, Any]) -> NoReturn:
    first, expected = next(iter(looks.items()))
    others = (number for number, look in looks.items() if look != expected)
    number = next(others, None)
    what = "" if number is None else f", and example {number} is {looks[number]}"
    raise UsageError(
        f"example {first} of the grain.MapDataset is {expected}{what}; map them all to numbers and "
        "numeric arrays of the same names, shapes and dtypes"
    )


def _begin_worker(index: int, count: int) -> None:
    """Runs in a worker process before it works."""
    end_with_parent()
    # They go to all processes of a terminal or a job, and the run may want batches until it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A transformation that uses JAX must not take memory of the accelerator that trains.
    jax.config.update("jax_platforms", "cpu")


def end_with_parent() -> None:
    """Lets this process end soon after its parent; grain's workers outlive one that is killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# --- looking into a pipeline ---------------------------------------------------------------------


def adapt(dataset: Any, batch_size: int) -> Any:
    """A bare `MapDataset` as a `GrainDataset`, of its own batch size if it has one; or as it is."""
    if not _is_grain(dataset, "MapDataset"):
        if _is_grain(dataset, "IterDataset"):
            _parse_flags()
        return dataset
    return GrainDataset(dataset, _own_batch_size(dataset) or batch_size)


def _parse_flags() -> None:
    # Starting its workers, grain reads flags of its own; a notebook has parsed none.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def begin(iterator: Any) -> None:
    """Starts the worker processes of an iterator of grain's, and sees that they end in order."""
    if not _is_grain(iterator, "DatasetIterator"):
        return
    # Left to themselves, those of mp_prefetch start one after the other once a state was asked for.
    iterator.get_state()
    iterator.start_prefetch()
    alive = weakref.ref(iterator)
    atexit.register(lambda: (found := alive()) and found.close())


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


def _own_batch_size(dataset: Any) -> int | None:
    """The B of the last `.batch(B)` of a `MapDataset`."""
    import grain

    batched = type(grain.MapDataset.range(1).batch(1))
    sizes = (node._batch_size for node in _nodes(dataset) if isinstance(node, batched))
    return next(sizes, None)


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
    """The seeds given in it. grain has no public name for them: a test holds where they are."""
    return [
        int(getattr(owner, name))
        for node in _nodes(dataset)
        for owner in (node, getattr(node, "_rng_pool", None))
        for name in ("_seed_rng_seed", "_seed")
        if getattr(owner, name, None) is not None and "_default_seed" not in vars(node)
    ]
