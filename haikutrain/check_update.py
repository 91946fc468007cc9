"""Checks of one update: its params, their gradients, the network state, and that it is pure."""

import copy
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haikutrain import devices
from haikutrain.check_table import Row, broken, held, listed, measured, unchecked
from haikutrain.check_trace import UpdateTrace, held_tracers, trace_update
from haikutrain.check_watch import Seen, Steps, one_step, watched
from haikutrain.errors import UsageError
from haikutrain.leaves import by_path
from haikutrain.start import Task

_STEPS = 16  # So many are looked at before a param or a state is accused.

PARAMS = "params can be trained"
PURE = "the update is a pure function"
GRADIENTS = "every param has a gradient"
CHANGES = "the optimizer changes the params"
STATE = "the network state is kept"


def params_row(task: Task) -> Row:
    """What params there are; an integer one is broken: no optimizer can train it."""
    table = by_path(task.programs.state.params)
    counts: dict[str, int] = {}
    for leaf in table.values():
        counts[leaf.dtype.name] = counts.get(leaf.dtype.name, 0) + leaf.size
    wrong = [
        f"params/{path} is {leaf.dtype.name}{list(leaf.shape)}"
        for path, leaf in table.items()
        if not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if wrong:
        return broken(
            PARAMS,
            listed(wrong),
            "an optimizer cannot train integers: give hk.get_parameter a float dtype, or keep what "
            "is not trained in hk.get_state or a NumPy constant",
        )
    kinds = ", ".join(f"{count:,} {dtype}" for dtype, count in counts.items())
    return held(PARAMS, f"{kinds or 'none'} in {len(table)} leaves")


def shapes_row(task: Task) -> Row:
    """How large each field of the state is."""
    state = task.programs.state
    fields = {name: by_path(getattr(state, name)) for name in vars(state)}
    text = [
        f"{name} {len(table)} leaves, {sum(leaf.size for leaf in table.values()):,} numbers"
        for name, table in fields.items()
        if table and name not in ("step", "rng")
    ]
    return measured("the state", "; ".join(text))


def take_steps(experiment: Any) -> tuple[Steps, Seen]:
    """Runs the first steps of an experiment, watched, until nothing is left to be suspected."""
    try:
        return _take_steps(experiment, spied=True)
    except (jax.errors.UnexpectedTracerError, TypeError):
        # The optimizer is used inside of another trace, in a loop say: what it was given there
        # cannot be had. If that is not it, the error comes again.
        return _take_steps(experiment, spied=False)


def _take_steps(experiment: Any, *, spied: bool) -> tuple[Steps, Seen]:
    made, seen = watched(experiment, spied=spied)
    task = Task(made)
    task.check_update()
    most = min(_STEPS, task.config.num_steps)
    try:
        task.feed.check_length(most)
    except UsageError:
        most = min(most, 4)
    return Steps(task, min(4, most), most, _nothing_to_suspect), seen


def _nothing_to_suspect(steps: Steps) -> bool:
    moved = all(any(steps.of("moved", path)) for path in steps.paths("moved"))
    felt = all(any(steps.of("grad", path)) for path in steps.paths("grad"))
    kept = all(any(steps.of("changed", path)) for path in steps.paths("changed"))
    return moved and felt and kept


def update_rows(steps: Steps, seen: Seen, trace: UpdateTrace) -> Iterator[Row]:
    """The rows of what these steps have shown."""
    yield _gradients_row(steps, trace)
    yield _changes_row(steps)
    yield _state_row(steps, seen)


# --- the trace -------------------------------------------------------------------------------


def pure_row(experiment: Any, task: Task) -> tuple[Row, UpdateTrace | None]:
    """Traces the update again and again: each time it must be the same program.

    Returns:
      The row, and the trace; None where it left values behind, so that it cannot be run.
    """
    kind, shapes, first = type(experiment), task.programs.state, task.feed.first
    mine = kind(copy.deepcopy(experiment.config))
    before = dict(vars(mine))
    trace = trace_update(mine, shapes, first)
    if stale := held_tracers(mine):
        where = f"after it self.{listed(stale)} holds a traced value"
        return broken(PURE, where, _SELF), None
    changed = [name for name, value in vars(mine).items() if _is_other(mine, name, value, before)]
    try:
        again = trace_update(mine, shapes, first)
    except jax.errors.UnexpectedTracerError:
        return broken(PURE, "traced again, it uses a value of the first trace", _SELF), None
    other = trace_update(kind(copy.deepcopy(experiment.config)), shapes, first)
    for repeated, whose in ((again, "once more"), (other, "in an experiment made anew")):
        if (repeated.text, repeated.constants) != (trace.text, trace.constants):
            where = f"traced {whose}, it is another program: {_difference(trace, repeated)}"
            if changed:
                return broken(PURE, f"{where}; it changed self.{listed(changed)}", _SELF), trace
            return broken(PURE, where, _HOST), trace
    return held(PURE, "traced three times, it is the same program"), trace


_SELF = (
    "the update runs as Python once, when it is traced: what it keeps on self never changes again "
    "and is in no checkpoint; keep it in the TrainState (hk.get_state and hk.set_state, or a field "
    "of a subclass)"
)
_HOST = (
    "something in it is read from the host while it is traced, and is then frozen (np.random, "
    "time, a Python variable that changes); draw from hk.next_rng_key() or rngs, or put it into "
    "the batch or the TrainState"
)


def _is_other(owner: Any, name: str, value: Any, before: dict[str, Any]) -> bool:
    """Whether an attribute was there before, on the object or its class, with another value."""
    if name in before:
        return before[name] is not value
    plain = getattr(type(owner), name, owner)
    return not (plain is owner or callable(plain) or hasattr(plain, "__get__"))


def _difference(a: UpdateTrace, b: UpdateTrace) -> str:
    if len(a.constants) != len(b.constants):
        return f"{len(a.constants)} constants were {len(b.constants)}"
    for old, new in zip(a.text.splitlines(), b.text.splitlines(), strict=False):
        if old != new:
            return f"`{_short(old)}` was `{_short(new)}`"
    return "a constant array in it has other values"


def traces_row(steps: Steps, seen: Seen) -> Row:
    """Goes on from a state that was on the host, as one restored is: no new trace may come."""
    what = "the update is traced once"
    restored = devices.place(jax.device_get(steps.first))
    one_step(steps.task, restored, steps.item)
    if seen.traces != 1:
        return broken(
            what,
            f"update ran as Python {seen.traces} times",
            "a state that is restored must look like one that is fresh: return arrays of the same "
            "shapes and dtypes",
        )
    return held(what, "for a fresh and for a restored state; structure and dtypes stay")


def _short(line: str) -> str:
    return " ".join(line.split())[:60]


# --- gradients -------------------------------------------------------------------------------


def _gradients_row(steps: Steps, trace: UpdateTrace) -> Row:
    count = len(steps.marks)
    if where := _not_finite(steps):
        return broken(
            GRADIENTS,
            f"{where} is not finite",
            "look for log or sqrt of 0, a division by 0, a where whose other branch is not "
            "finite, or a learning rate that is too high",
        )
    if "grads" not in steps.marks[0]:
        still = [path for path in steps.paths("moved") if not any(steps.of("moved", path))]
        why = "gradients cannot be seen, for update itself does not call optimizer()"
        if not still:
            return held(GRADIENTS, f"{why}; every param changes in the first {count} steps")
        return unchecked(GRADIENTS, f"{why}; {_params(still)} never changed")
    silent = [p for p in steps.paths("grad") if not any(steps.of("grad", p))]
    frozen = [p for p in silent if not any(steps.of("probe", p)) and _anything(steps, "probe")]
    silent = [path for path in silent if path not in frozen]
    if not silent:
        note = f"; declared frozen: {_params(frozen)}" if frozen else ""
        return held(GRADIENTS, f"finite, and not 0 in some of {count} steps{note}")
    reads = trace.loss_reads
    unread = reads is not None and not any(f"params/{path}" in reads for path in silent)
    cause = (
        "the loss does not use it: a layer whose output is ignored"
        if unread
        else "something stops its gradient: stop_gradient, argmax, rounding, a dead ReLU"
    )
    return broken(
        GRADIENTS,
        f"{_params(silent)} had a gradient of 0 in all of {count} steps",
        f"{cause}; if it is not to be trained, say so: haikutrain.freeze(optimizer, "
        f"haikutrain.mask_by_name({silent[0]!r}))",
    )


def _not_finite(steps: Steps) -> str:
    """What was not finite first, and at which step."""
    scaled = "loss_scale" in steps.first.extras
    for number, metrics in enumerate(steps.metrics):
        bad = [name for name, value in metrics.items() if not np.isfinite(value)]
        marks = steps.marks[number]
        leaves = [path for path in steps.paths("grad") if not np.isfinite(marks[f"grad/{path}"])]
        if leaves and scaled and number + 1 < len(steps.marks):
            continue  # The loss scale comes down by such steps.
        if leaves:
            return f"step {number + 1}: the gradient of {_params(leaves)}"
        if bad:
            return f"step {number + 1}: the metric {listed(bad)}"
    return ""


def _anything(steps: Steps, kind: str) -> bool:
    return any(any(steps.of(kind, path)) for path in steps.paths(kind))


def _changes_row(steps: Steps) -> Row:
    count = len(steps.marks)
    still = [path for path in steps.paths("moved") if not any(steps.of("moved", path))]
    if not still:
        return held(CHANGES, f"all of them, in {count} steps")
    if any(isinstance(node, optax.MultiStepsState) for node in _nodes(steps.first.opt_state)):
        return unchecked(CHANGES, "optax.MultiSteps changes them once in several steps")
    if "grads" not in steps.marks[0]:
        if len(still) == len(steps.paths("moved")) and still:
            return broken(CHANGES, f"no param changed in {count} steps", _NOT_APPLIED)
        return unchecked(CHANGES, f"{_params(still)} never changed in {count} steps")
    if not _anything(steps, "probe"):
        return broken(
            CHANGES,
            f"in {count} steps the optimizer changed nothing, whatever the gradients",
            "its learning rate is 0, or it is optax.set_to_zero: look at its schedule",
        )
    lost = [path for path in still if any(steps.of("lost", path))]
    if lost:
        where = f"the optimizer changed {_params(lost)}, and the returned state does not"
        return broken(CHANGES, where, _NOT_APPLIED)
    frozen = [path for path in still if not any(steps.of("probe", path))]
    others = [path for path in still if path not in frozen]
    notes = [f"frozen: {_params(frozen)}"] if frozen else []
    notes += [f"too little for its dtype: {_params(others)}"] if others else []
    return held(CHANGES, "; ".join(notes))


_NOT_APPLIED = (
    "the new params are not in the state that update returns: return what apply_gradients gives, "
    "or state.replace(params=optax.apply_updates(state.params, changes))"
)


def _params(paths: list[str]) -> str:
    return listed([f"params/{path}" for path in paths])


def _states(paths: list[str]) -> str:
    return listed([f"network_state/{path}" for path in paths])


def _nodes(tree: Any) -> list[Any]:
    found: list[Any] = []

    def look(node: Any) -> bool:
        found.append(node)
        return False

    jax.tree.leaves(tree, is_leaf=look)
    return found


# --- network state ---------------------------------------------------------------------------


def _state_row(steps: Steps, seen: Seen) -> Row:
    paths, count = steps.paths("changed"), len(steps.marks)
    if not paths:
        return held(STATE, "there is none")
    for path in steps.paths("count"):
        rises = steps.of("count", path)
        # By the micro-batches of a step, times how often the module is called.
        if any(rises) and (rises[-1] == 0 or len({rise for rise in rises if rise}) > 1):
            return broken(
                STATE,
                f"network_state/{path} rose by {', '.join(f'{rise:g}' for rise in rises)}, and "
                "should by as much in each step",
                "the network begins each step with a state made anew: give network.apply the "
                "state's network_state, and return the one that it gives",
            )
    still = [path for path in paths if not any(steps.of("changed", path))]
    moving = {_module(path) for path in paths if path not in still}
    dropped = [
        path
        for path in still
        if _module(path) not in moving and any(_ends(path, name) for name in seen.set_in_update)
    ]
    if dropped or (len(still) == len(paths) and not seen.haiku):
        return broken(
            STATE,
            f"{_states(dropped or still)} did not change in {count} steps"
            + (", though the network sets it" if dropped else ""),
            "the network's new state is dropped: return it in the state, for instance by "
            "apply_gradients(..., network_state=...)",
        )
    if still:
        stays = f"{_states(still)} stays as it is, and the network does not set it"
        return held(STATE, stays)
    return held(STATE, f"all {len(paths)} leaves change with the steps")


def _module(path: str) -> str:
    return path.rpartition("/")[0]


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f"/{name}")
