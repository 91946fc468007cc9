"""Checks of evaluation: it does not train, and an example's metrics are its own."""

from typing import Any

import jax
import numpy as np

from haikutrain import devices
from haikutrain.check_table import Row, broken, held, listed, unchecked
from haikutrain.check_watch import Seen, Steps
from haikutrain.leaves import digest

EVALUATION = "evaluation does not train"


def evaluation_row(steps: Steps, seen: Seen) -> Row:
    """Evaluates one example among others and among copies of itself: the metrics must be equal."""
    task = steps.task
    if not task.eval_feeds:
        return unchecked(EVALUATION, "there is no eval_data")
    before = digest(steps.last)
    found: list[str] = []
    for split, feed in task.eval_feeds.items():
        item = next(iter(feed.items()))
        found += [f"{split}/{name}" for name in _swayed(task, steps.last, split, item)]
    if digest(steps.last) != before:
        return broken(
            EVALUATION,
            "the state is another one after an evaluation",
            "evaluate must not write into the arrays that it is given",
        )
    trains = listed(sorted(seen.set_in_evaluate))
    if found and (seen.set_in_evaluate or not seen.haiku):
        sets = f", and the network sets {trains}" if trains else ""
        return broken(
            EVALUATION,
            f"{listed(found)} of an example changes with the other examples of its batch{sets}",
            "the network is in training mode (is_training=True, batch statistics) in evaluation: "
            "give it is_training=False",
        )
    notes = [f"{listed(found)} depends on the other examples of a batch"] if found else []
    notes += [f"the network sets {trains}, which is dropped"] if trains else []
    return held(EVALUATION, "; ".join(["the state stays", *notes]))


def _swayed(task: Any, state: Any, split: str, item: Any) -> list[str]:
    """The metrics of the first example that depend on the others beside it."""
    rows = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), item.batch)
    count = len(jax.tree.leaves(rows)[0])
    if count < 2:
        return []

    def of_row(row: int, batch: Any) -> Any:
        mask = devices.place_batch(np.arange(count) == row)
        alone = item._replace(batch=batch, mask=mask, padded=False)
        return jax.device_get(task.programs.evaluate(state, split, alone))

    copies = devices.place_batch(jax.tree.map(lambda x: np.repeat(x[:1], count, 0), rows))
    among, beside, second = of_row(0, item.batch), of_row(0, copies), of_row(1, item.batch)
    # What is the same whatever row is asked for may be the mean of the batch.
    means = {name for name, value in among["sums"].items() if value == second["sums"][name]}
    pairs = {k: (v, beside["sums"][k]) for k, v in among["sums"].items() if k not in means}
    kept = among.get("rows", {})
    pairs |= {name: (values[:1], beside["rows"][name][:1]) for name, values in kept.items()}
    return [name for name, pair in pairs.items() if _differ(*pair)]


def _differ(a: Any, b: Any) -> bool:
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return not np.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
