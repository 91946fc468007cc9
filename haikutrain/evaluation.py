"""Evaluation of a state: every split, each example once."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from haikutrain import devices
from haikutrain.errors import UsageError
from haikutrain.metrics import Mean
from haikutrain.start import Task
from haikutrain.train_state import TrainState
from haikutrain.writers import Media, MetricWriter

Evaluations = dict[str, dict[str, float]]
"""For each split its metrics."""


@dataclasses.dataclass(frozen=True)
class SplitResult:
    """What the evaluation of one split gave."""

    scalars: dict[str, float]
    """Exact means over all its examples, and the scalars of the experiment's report."""
    media: dict[str, Media]
    """The report's pictures and texts."""
    rows: dict[str, np.ndarray]
    """`[N, ...]`: values kept row by row, each example once and in order."""


def evaluate_splits(task: Task, state: TrainState) -> dict[str, SplitResult]:
    """Evaluates every split of the experiment."""
    return {split: _evaluate_split(task, state, split) for split in task.eval_feeds}


def _evaluate_split(task: Task, state: TrainState, split: str) -> SplitResult:
    feed = task.eval_feeds[split]
    items = feed.items()
    mean, kept = Mean(), []
    results = (task.programs.evaluate(state, split, item) for item in items)
    for part in devices.fetched(results, limit=2 if feed.endless else 16):
        if feed.endless and not part["count"]:
            break
        mean.add(part["sums"], part["count"])
        if "rows" in part:
            kept.append({name: rows[part["mask"]] for name, rows in part["rows"].items()})
    rows = {name: np.concatenate([part[name] for part in kept]) for name in (kept or [{}])[0]}
    scalars, media = mean.result(), {}
    if not mean.count:
        raise UsageError(f"eval_data ({split!r}) has no rows")
    report = task.experiment.report(state, split, rows)
    if not isinstance(report, Mapping):
        raise UsageError(f"report returned a {type(report).__name__}; return a dict")
    for name, value in report.items():
        if name in scalars:
            raise UsageError(f"report gives {name!r}, which is a metric of evaluation: rename one")
        if isinstance(value, str) or (isinstance(value, np.ndarray) and value.ndim):
            media[name] = value
        else:
            scalars[name] = _number(name, value)
    return SplitResult(scalars, media, rows)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"report gives {name!r} as a {type(value).__name__}; give a number, a picture (a NumPy "
            "array) or a text"
        ) from error


def scalars(results: Mapping[str, SplitResult]) -> Evaluations:
    """The numbers alone."""
    return {split: result.scalars for split, result in results.items()}


def write(writer: MetricWriter, step: int, results: Mapping[str, SplitResult]) -> None:
    """Hands all results to a writer."""
    for split, result in results.items():
        writer.write(step, split, result.scalars)
        if result.media:
            writer.write_media(step, split, result.media)
