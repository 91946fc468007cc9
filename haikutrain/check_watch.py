"""An experiment that is watched: the real programs run, and say more than their metrics.

What is seen of each leaf travels among the training metrics under names that begin with `check:`,
so that nothing but the framework's own programs is needed to run it.
"""

import contextlib
import copy
import dataclasses
import itertools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from haikutrain import collectives, devices
from haikutrain.leaves import by_path, is_key
from haikutrain.metrics import empty_window
from haikutrain.start import Task

_MARK = "check:"


@dataclasses.dataclass
class Seen:
    """What was noticed while an experiment's functions were traced."""

    spied: bool = True
    """Whether the optimizer is to be looked at."""
    traces: int = 0
    """How often `update` ran as Python."""
    haiku: bool = False
    """Whether any Haiku module was called."""
    set_in_update: set[str] = dataclasses.field(default_factory=set)
    """The names of Haiku states that were set in `update`."""
    set_in_evaluate: set[str] = dataclasses.field(default_factory=set)
    """The same, in `evaluate`."""
    local_norms: set[str] = dataclasses.field(default_factory=set)
    """The `hk.BatchNorm`s that normalise by the batch of one device."""


def watched(experiment: Any, *, spied: bool = True) -> tuple[Any, Seen]:
    """An experiment like this one, made anew, that marks what it sees; and what was noticed."""
    kind, seen = type(experiment), Seen(spied)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def optimizer(self) -> Any:
            optimizer = super().optimizer()
            spies = seen.spied and hasattr(optimizer, "update") and hasattr(optimizer, "init")
            return _spy(optimizer, self) if spies else optimizer

        def loss(self, batch: Any, is_training: bool) -> Any:
            with _setting(self._check_sets):
                return super().loss(batch, is_training)

        def gradients(self, state: Any, batch: Any, rngs: Any) -> Any:
            result = super().gradients(state, batch, rngs)
            if seen.spied:
                self._check_losses = lax.all_gather(result[2]["loss"], collectives.AXIS)
            return result

        def update(self, state: Any, batch: Any, rngs: Any) -> Any:
            seen.traces += 1
            self._check_calls: list[Any] = []
            self._check_losses = None
            with _network(seen, seen.set_in_update, self):
                result = super().update(state, batch, rngs)
            if not (isinstance(result, tuple) and len(result) == 2):
                return result
            new, metrics = result
            marks = _marks(state, new, self._check_calls, self._check_losses)
            marks |= _uneven(metrics)
            self._check_calls, self._check_losses = [], None
            named = {f"{_MARK}{name}": value for name, value in marks.items()}
            return new, {**metrics, **named} if isinstance(metrics, Mapping) else metrics

        def evaluate(self, state: Any, batch: Any, rngs: Any) -> Any:
            with _network(seen, seen.set_in_evaluate, self):
                return super().evaluate(state, batch, rngs)

    Watched.__name__, Watched.__module__ = kind.__name__, kind.__module__
    Watched.__qualname__ = kind.__qualname__
    made = Watched(copy.deepcopy(experiment.config))
    made._check_calls, made._check_sets = [], set()
    return made, seen


def _spy(optimizer: Any, owner: Any) -> Any:
    inner = optax.with_extra_args_support(optimizer)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        changes, new = inner.update(grads, state, params, **extra)
        ones = jax.tree.map(jnp.ones_like, grads)
        probe = inner.update(ones, state, params, **extra)[0]
        owner._check_calls.append((grads, changes, probe))
        return changes, new

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


@contextlib.contextmanager
def _network(seen: Seen, names: set[str], owner: Any) -> Iterator[None]:
    owner._check_sets = names

    def intercept(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "__init__":
            return method(*args, **kwargs)
        seen.haiku = True
        before = len(names)
        with _setting(names):
            result = method(*args, **kwargs)
        module = context.module
        local = isinstance(module, hk.BatchNorm) and module.cross_replica_axis is None
        if local and len(names) > before and names is seen.set_in_update:
            seen.local_norms.add(module.module_name)
        return result

    with hk.intercept_methods(intercept):
        yield


@contextlib.contextmanager
def _setting(names: set[str]) -> Iterator[None]:
    """Notes the names of what Haiku sets in here, where Haiku is running."""

    def note(next_setter: Any, value: Any, context: Any) -> Any:
        names.add(context.full_name)
        return next_setter(value)

    try:
        hk.running_init()
    except ValueError:  # Not in a Haiku function.
        yield
        return
    with hk.custom_setter(note):
        yield


def _marks(old: Any, new: Any, calls: list[Any], losses: Any) -> dict[str, Any]:
    """What is to be seen of one update, as scalars."""
    marks: dict[str, Any] = {}
    paths = list(by_path(old.params))
    same = [c for c in calls if _structure(c[0]) == _structure(old.params)]
    for path, a, b in _pairs(old.params, new.params):
        marks[f"moved/{path}"] = _differ(a, b)
    if same:
        grads, changes, probe = same[-1]
        expected = optax.apply_updates(old.params, changes)
        marks["grads"] = 1.0
        split = collectives.differs(grads)
        rows = (paths, *map(jax.tree.leaves, (old.params, new.params, expected, grads, probe)))
        for i, (path, before, after, wanted, grad, tried) in enumerate(zip(*rows, strict=True)):
            marks[f"grad/{path}"] = jnp.max(jnp.abs(grad)) if grad.size else 1.0
            marks[f"probe/{path}"] = jnp.any(tried != 0)
            marks[f"lost/{path}"] = _differ(before, wanted) & ~_differ(before, after)
            marks[f"split/{path}"] = split[i]
    for path, a, b in _pairs(old.network_state, new.network_state):
        marks[f"changed/{path}"] = _differ(a, b)
        if path.rpartition("/")[2] == "counter" and jnp.ndim(a) == 0:
            marks[f"count/{path}"] = b - a
    if losses is not None:
        marks.update({f"loss_on/{i}": losses[i] for i in range(losses.shape[0])})
    return marks


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def _uneven(metrics: Any) -> dict[str, Any]:
    """Which metrics are not the same on all devices."""
    table = by_path(metrics)
    if not table or not isinstance(metrics, Mapping):
        return {}
    flags = collectives.differs(jax.tree.map(jnp.asarray, metrics))
    return {f"uneven/{path}": flags[i] for i, path in enumerate(table)}


def _pairs(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    after = by_path(new)
    return ((path, leaf, after[path]) for path, leaf in by_path(old).items() if path in after)


def _differ(a: Any, b: Any) -> Any:
    if is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return jnp.any((a != b) & ~((a != a) & (b != b)))


class Steps:
    """Steps that were run, and what was seen in each.

    Attributes:
      marks: for each step what `_marks` names, as floats.
      metrics: for each step the experiment's own training metrics.
      data: for each step one checksum of its global batch, whatever devices it is on.
      first: a copy of the state before the first step.
      second: and after it.
      last: the state after the last step, on the devices.
      item: the first step's batch, on the devices.
      batches: of the first steps, `[B, ...]`, on the host: as many as one call takes, or two.
    """

    def __init__(self, task: Task, least: int, most: int, enough: Any = lambda steps: True):
        """Runs at least `least` and at most `most` steps, until `enough(self)`."""
        self.task = task
        self.marks: list[dict[str, float]] = []
        self.metrics: list[dict[str, float]] = []
        self.data: list[int] = []
        self.batches: list[Any] = []
        self.last = task.programs.init()
        self.first = devices.snapshot(self.last)
        plan = ((step, 1) for step in itertools.count())
        with task.feed.items(itertools.islice(plan, most), None) as items:
            for item in items:
                if not self.data:
                    self.item = item
                self.data.append(checksum(item.batch))
                if len(self.batches) < min(max(task.config.steps_per_call, 2), 8):
                    self.batches.append(jax.tree.map(_whole, item.batch))
                self.last, values = one_step(task, self.last, item)
                self.marks.append(values.pop("marks"))
                self.metrics.append(values)
                if len(self.data) == 1:
                    self.second = devices.snapshot(self.last)
                if len(self.data) >= least and enough(self):
                    break

    def of(self, kind: str, path: str) -> list[float]:
        """A mark in each step."""
        return [marks[f"{kind}/{path}"] for marks in self.marks]

    def paths(self, kind: str) -> list[str]:
        """The paths that there are marks of a kind for."""
        return [name[len(kind) + 1 :] for name in self.marks[0] if name.startswith(f"{kind}/")]


def _whole(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).reshape(-1, *leaf.shape[2:])


def one_step(task: Task, state: Any, item: Any) -> tuple[Any, dict[str, Any]]:
    """The state after an item, which is donated, and its metrics; its marks under `marks`."""
    names = task.programs.metric_names
    zeros = devices.place(empty_window(names))
    state, sums = task.programs.update(state, zeros, item)
    values: dict[str, Any] = dict(zip(names, np.asarray(sums)[: len(names)].tolist(), strict=True))
    marks = {k[len(_MARK) :]: values.pop(k) for k in list(values) if k.startswith(_MARK)}
    return state, {**values, "marks": marks}


def checksum(batch: Any) -> int:
    """Of a placed batch `[D, B / D, ...]`, the same for every D."""
    total = 0
    for path, leaf in sorted(by_path(batch).items()):
        array = np.asarray(leaf)
        total = zlib.crc32(f"{path} {array.dtype.name} {array.shape[2:]}".encode(), total)
        # Types of ml_dtypes have no buffer protocol of their own.
        total = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, total)
    return total
