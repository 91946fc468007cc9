"""Checks of what devices have in common, the state, and of what they must not, random numbers."""

from typing import Any

import jax
import numpy as np

from haikutrain import devices
from haikutrain.check_table import Row, broken, held, listed, unchecked
from haikutrain.check_trace import UpdateTrace
from haikutrain.check_watch import Steps, one_step
from haikutrain.feed import TrainItem

REPLICAS = "replicas stay equal"
RANDOM = "randomness differs by device and step"


def replicas_row(steps: Steps) -> Row:
    """Compares the state's replicas after the last step."""
    count = devices.device_count()
    if count == 1:
        return unchecked(REPLICAS, "there is one device, and the batch cannot be split")
    different = devices.drifted(steps.last)
    uneven = [name for name in steps.paths("uneven") if any(steps.of("uneven", name))]
    if uneven and not different:
        where = f"the metric {listed(uneven)} is not the same on all devices"
        do = "what is logged is the first device's: average metrics in update (haikutrain.pmean)"
        return broken(REPLICAS, where, do)
    if not different:
        return held(REPLICAS, f"after {len(steps.marks)} steps on {count} devices")
    split = [p for p in steps.paths("split") if any(steps.of("split", p))]
    if split:
        named = listed([f"params/{path}" for path in split])
        where = f"the optimizer is given another gradient on each device: {named}"
        do = "average the gradients: haikutrain.apply_gradients does, or haikutrain.pmean"
    else:
        where = f"{listed(different)} is not the same on all devices"
        do = "average it in update with haikutrain.pmean, or compute it from what was averaged"
    if any(path.startswith("network_state") for path in different) and split:
        where += f"; and {listed([p for p in different if p.startswith('network_state')])}"
    return broken(REPLICAS, where, do)


_ONE_KEY = "take keys from hk.next_rng_key() in loss, or from rngs in update: they differ by both"


def random_row(steps: Steps, trace: UpdateTrace) -> Row:
    """Follows each draw to its key; then other keys must give another update, if any are drawn."""
    by_device = {draw.source for draw in trace.draws if not draw.differs_by_device}
    by_step = {draw.source for draw in trace.draws if not draw.differs_by_step}
    if fixed := sorted(by_device & by_step):
        where = f"{listed(fixed)}: the same numbers at every step and on every device"
        do = "the key is a constant (jax.random.key(0), hk.PRNGSequence(0)); "
        return broken(RANDOM, where, f"{do}{_ONE_KEY}; if it is meant so, draw in NumPy")
    if same := sorted(by_device):
        where = f"{listed(same)}: the same numbers on every device"
        return broken(RANDOM, where, f"one key for all devices; {_ONE_KEY}")
    if stale := sorted(by_step):
        where = f"{listed(stale)}: the same numbers at every step"
        return broken(RANDOM, where, f"the key does not advance; {_ONE_KEY}")
    matters = _outcome(steps, steps.first.rng) != _outcome(steps, steps.second.rng)
    if not trace.draws and not matters:
        return held(RANDOM, "no randomness is used")
    if not matters:
        return held(RANDOM, "random numbers are drawn, and change nothing")
    sources = listed(sorted({draw.source for draw in trace.draws}))
    losses = _losses_of_equal_rows(steps)
    if len(losses[0]) == 1:
        return held(RANDOM, f"drawn in {sources}")
    if all(len(set(each)) == 1 for each in losses) and len({each[0] for each in losses}) > 1:
        where = f"equal rows have the loss {losses[0][0]:.6g} on each of {len(losses[0])} devices"
        return broken(RANDOM, where, _ONE_KEY)
    differ = any(len(set(each)) > 1 for each in losses)
    seen = "; equal rows have another loss on each device" if differ else ""
    return held(RANDOM, f"drawn in {sources}{seen}")


def _outcome(steps: Steps, rng: Any) -> list[bytes]:
    """Of the first step with this key."""
    state, values = one_step(steps.task, devices.place(steps.first.replace(rng=rng)), steps.item)
    values.pop("marks")
    host = jax.device_get(state.replace(rng=None))
    kept = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(host)]
    return [*kept, np.array(list(values.values())).tobytes()]


def _losses_of_equal_rows(steps: Steps) -> list[list[float]]:
    """On each device, where all are given the rows of the first one; with a few keys in turn.

    One key is not enough: a dropout of few units may well drop the same ones.
    """
    first = jax.tree.map(lambda x: np.repeat(np.asarray(x)[:1], len(x), 0), steps.item.batch)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), first)
    item = TrainItem(1, devices.place_batch(rows), None)
    rng, found = steps.first.rng, []
    for _ in range(4):
        given = devices.place(steps.first.replace(rng=rng))
        state, values = one_step(steps.task, given, item)
        marks, rng = values["marks"], devices.snapshot(state.rng)
        found.append([value for name, value in marks.items() if name.startswith("loss_on/")])
    return found if found[0] else [[0.0]]
