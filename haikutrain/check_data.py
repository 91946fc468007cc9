"""Checks of the training data: it resumes, its buffers stay, each example comes once an epoch."""

import collections
import contextlib
import copy
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from haikutrain import pipeline
from haikutrain.check_table import HELD, Row, broken, held, listed, unchecked
from haikutrain.data import ArrayDataset, is_by_step, length
from haikutrain.leaves import by_path
from haikutrain.positions import decode, encode

RESUMES = "the data resumes exactly"
BUFFERS = "a batch is not overwritten later"
SPLIT = "a batch is the same on any devices"
EPOCH = "each example comes once an epoch"

_NAMES = {"id", "ids", "index", "idx", "row", "example_id", "example_index", "uid"}
_SECONDS, _BATCHES = 20.0, 4096  # Of an epoch that is read for its row indices.
_LARGE = 2**28  # Bytes of a batch of which few are kept.


def data_rows(experiment: Any) -> Iterator[Row]:
    """The rows of an experiment's `train_data`, of either protocol."""
    size = experiment.config.batch_size
    dataset = _fresh(experiment)
    if is_by_step(dataset):
        yield from _by_step(experiment, dataset, size)
    else:
        yield from _by_iterator(experiment, dataset)
    yield _epoch_row(experiment, size)


def _fresh(experiment: Any) -> Any:
    """The dataset of an experiment made anew, as another process would make it."""
    made = type(experiment)(copy.deepcopy(experiment.config))
    return pipeline.adapt(made.train_data(), experiment.config.batch_size)


def _copied(batch: Any) -> dict[str, np.ndarray]:
    return {path: np.array(leaf) for path, leaf in by_path(batch).items()}


def _changed(before: dict[str, np.ndarray], after: Any) -> list[str]:
    """The fields whose bytes differ."""
    now = {path: np.asarray(leaf) for path, leaf in by_path(after).items()}
    return [
        path
        for path in {**before, **now}
        if path not in before
        or path not in now
        or before[path].shape != now[path].shape
        or before[path].tobytes() != now[path].tobytes()
    ]


# --- by step ---------------------------------------------------------------------------------


def _by_step(experiment: Any, dataset: Any, size: int) -> Iterator[Row]:
    rows = slice(0, size)
    count = length(dataset) or 10**9
    first = _copied(dataset.batch(0, rows))
    large = sum(array.nbytes for array in first.values()) > _LARGE
    steps = [step for step in ((0, 1) if large else (0, 1, 2, 5, 100)) if step < count]
    given: dict[int, Any] = {}
    copies: dict[int, dict[str, np.ndarray]] = {}
    for step in steps:  # Copied at once: the next one may be written over it.
        given[step] = dataset.batch(step, rows)
        copies[step] = _copied(given[step])
    pure = _pure_row(experiment, dataset, steps, copies, rows)
    yield pure
    overwritten = [
        f"{path} of batch {step}" for step in steps for path in _changed(copies[step], given[step])
    ]
    yield _buffers_row(overwritten)
    if pure.result == HELD:
        yield _split_row(dataset, size, copies[0])
    else:
        yield unchecked(SPLIT, "a batch is not the same when asked for again")


def _pure_row(
    experiment: Any, dataset: Any, steps: list[int], copies: dict[int, Any], rows: slice
) -> Row:
    cause = (
        "batch(step, rows) must be a function of its arguments alone: no counter, no random "
        "generator that goes on, but np.random.default_rng([seed, step])"
    )
    for step in reversed(steps):
        if fields := _changed(copies[step], dataset.batch(step, rows)):
            where = f"batch({step}), asked for again, has another {listed(fields)}"
            return broken(RESUMES, where, cause)
    other = _fresh(experiment)
    for step in steps:
        if fields := _changed(copies[step], other.batch(step, rows)):
            where = f"batch({step}) of a dataset made anew has another {listed(fields)}"
            return broken(RESUMES, where, f"{cause}; and no seed from the clock")
    return held(RESUMES, f"batches {', '.join(map(str, steps))}, in any order, made anew as well")


def _split_row(dataset: Any, size: int, whole: dict[str, np.ndarray]) -> Row:
    tried = [parts for parts in (1, 2, 4) if size % parts == 0]
    for parts in tried:
        step = size // parts
        pieces = [_copied(dataset.batch(0, slice(i, i + step))) for i in range(0, size, step)]
        joined = {path: np.concatenate([piece[path] for piece in pieces]) for path in pieces[0]}
        if fields := _changed(whole, joined):
            return broken(
                SPLIT,
                f"{listed(fields)} of batch 0 is another one when asked for in {parts} parts",
                "batch(step, rows) must give the rows `rows` of the one global batch: choose all "
                "rows of the batch first, and then slice",
            )
    return held(SPLIT, f"asked for in {', '.join(map(str, tried))} parts")


def _buffers_row(overwritten: list[str]) -> Row:
    if overwritten:
        return broken(
            BUFFERS,
            f"{listed(overwritten)} changed when later batches were made",
            "the dataset writes each batch into the same array: make a new one for each, or "
            "yield a copy",
        )
    return held(BUFFERS, "earlier batches stay as they were")


# --- by iterator -----------------------------------------------------------------------------


@contextlib.contextmanager
def _iterating(dataset: Any, position: Any = None) -> Iterator[Any]:
    iterator = iter(dataset)
    pipeline.begin(iterator)
    if position is not None:
        iterator.set_state(decode(position))
    try:
        yield iterator
    finally:
        if hasattr(iterator, "close"):
            iterator.close()


def _by_iterator(experiment: Any, dataset: Any) -> Iterator[Row]:
    with _iterating(dataset) as iterator:
        start = encode(copy.deepcopy(iterator.get_state()))
        # Copied at once: the next one may be written over it.
        pairs = [(batch, _copied(batch)) for batch in itertools.islice(iterator, 2)]
        position = encode(copy.deepcopy(iterator.get_state()))
        pairs += [(batch, _copied(batch)) for batch in itertools.islice(iterator, 3)]
        copies = [copied for _, copied in pairs]
        overwritten = [
            f"{path} of batch {number}"
            for number, (batch, copied) in enumerate(pairs)
            for path in _changed(copied, batch)
        ]
    yield _position_row(experiment, start, position, copies)
    yield _buffers_row(overwritten)
    yield unchecked(SPLIT, "an iterator gives each process its own rows")


def _position_row(experiment: Any, start: Any, position: Any, copies: list[Any]) -> Row:
    with _iterating(_fresh(experiment), start) as iterator:
        if fields := _changed(copies[0], next(iterator)):
            return broken(
                RESUMES,
                f"made anew and set to the beginning, it has another {listed(fields)}",
                "its order is another one in each process: seed it from config.seed",
            )
    with _iterating(_fresh(experiment), position) as iterator:
        later = [_copied(batch) for batch in itertools.islice(iterator, len(copies) - 2)]
    if not later:
        return unchecked(RESUMES, f"there are only {len(copies)} batches")
    if fields := _changed(copies[2], later[0]):
        if not _changed(copies[0], later[0]):
            cause = "the data restarts: set_state ignores the position that it is given"
        else:
            cause = "set_state must restore all that get_state's place depends on, shuffling too"
        return broken(
            RESUMES,
            f"set to the position after batch 1, it goes on with another {listed(fields)}",
            cause,
        )
    for number in range(1, len(later)):
        if fields := _changed(copies[2 + number], later[number]):
            where = f"batch {2 + number} after set_state has another {listed(fields)}"
            return broken(RESUMES, where, "what follows a position depends on what came before it")
    return held(RESUMES, "set_state in an iterator made anew gives the same next batches")


# --- an epoch --------------------------------------------------------------------------------


def _epoch_row(experiment: Any, size: int) -> Row:
    dataset = _fresh(experiment)
    examples = getattr(dataset, "num_examples", None)
    examples = examples if isinstance(examples, int) else None
    if type(dataset) is ArrayDataset and dataset.seed is not None:
        order = ArrayDataset(np.arange(dataset.num_examples), size, dataset.seed)
        batches = [order.batch(step) for step in range(-(-dataset.num_examples // size))]
        return _judge("the order of ArrayDataset", batches, examples)
    fields, whole = _read(dataset, size, examples)
    named = {k: v for k, v in fields.items() if _is_index(k, np.concatenate(v), examples)}
    if not named:
        return unchecked(EPOCH, "no row indices: no field of a batch is an integer id")
    name, ids = next(iter(named.items()))
    if not whole:
        return unchecked(EPOCH, f"an epoch takes too long to read: {name} in {len(ids):,} batches")
    return _judge(name, ids, examples)


_Fields = dict[str, list[np.ndarray]]


def _read(dataset: Any, size: int, examples: int | None) -> tuple[_Fields, bool]:
    """The integer fields of two epochs, batch by batch; and whether these were read whole."""
    wanted = _BATCHES if examples is None else -(-2 * examples // size)
    found: _Fields = {}
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if is_by_step(dataset):
            end = min(wanted, length(dataset) or wanted)
            batches: Iterator[Any] = (dataset.batch(s, slice(0, size)) for s in range(end))
        else:
            batches = itertools.islice(stack.enter_context(_iterating(dataset)), wanted)
        for number, batch in enumerate(batches):
            for path, leaf in by_path(batch).items():
                array = np.array(leaf)
                if array.ndim == 1 and array.dtype.kind in "iu":
                    found.setdefault(path, []).append(array)
            if number == 3:  # What has repeated itself already, as labels do, is not read on.
                found = {k: v for k, v in found.items() if _may_be_index(k, np.concatenate(v))}
            if not found or time.monotonic() - began > _SECONDS or number >= _BATCHES:
                return found, False
            if examples is None and number % 64 == 63 and _repeated(found):
                break
    return found, examples is not None or _repeated(found)


def _may_be_index(name: str, ids: np.ndarray) -> bool:
    named = name.rpartition("/")[2].lower() in _NAMES
    return named or len(np.unique(ids)) > 0.5 * len(ids)


def _repeated(found: _Fields) -> bool:
    """Whether every id was seen more than once: at least an epoch has gone by."""
    for parts in found.values():
        _, counts = np.unique(np.concatenate(parts), return_counts=True)
        if len(counts) > 1 and counts.min() >= 2:
            return True
    return False


def _is_index(name: str, ids: np.ndarray, examples: int | None) -> bool:
    """Whether a field looks like the numbers of examples rather than like labels."""
    distinct = np.unique(ids)
    expected = min(examples or len(distinct), len(ids))
    if name.rpartition("/")[2].lower() in _NAMES:
        return len(distinct) >= 0.3 * expected
    if examples is None or len(distinct) < 16:
        return False
    return len(distinct) >= 0.9 * expected and np.ptp(distinct) < 1.1 * examples


def _judge(name: str, batches: list[np.ndarray], examples: int | None) -> Row:
    """No example may come again before all others have come; within a batch in any order."""
    every = np.unique(np.concatenate(batches)).tolist()
    counts = dict.fromkeys(every, 0)
    at_count = collections.Counter({0: len(every)})
    fewest = read = 0
    for batch in batches:
        for number in batch.tolist():
            at_count[counts[number]] -= 1
            counts[number] += 1
            at_count[counts[number]] += 1
        read += len(batch)
        while not at_count[fewest]:
            fewest += 1
        often = max(batch.tolist(), key=counts.__getitem__)
        if counts[often] > fewest + 1:
            late = [str(number) for number, count in counts.items() if count == fewest]
            where = f"{name}: of {read} examples {often} came {counts[often]} times and "
            return broken(EPOCH, f"{where}{listed(late)} {_times(fewest)}", _ONE_PERMUTATION)
    if examples is not None and len(every) != examples and read >= examples:
        where = f"{name}: {len(every)} different ones in {read}, and there are {examples} examples"
        return broken(EPOCH, where, _ONE_PERMUTATION)
    return held(EPOCH, f"{name}: {len(every)} different ones, evenly, in {read} examples")


def _times(count: int) -> str:
    return "not at all" if count == 0 else f"{count} times" if count > 1 else "once"


_ONE_PERMUTATION = (
    "an epoch must be one permutation of all examples: draw without replacement, and keep the last "
    "rows, which fill no batch, for the next one"
)
