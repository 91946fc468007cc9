"""Schedules, masks, clipping and averages: plain optax, with the step as the only clock.

Any optax optimizer works without this module. It adds schedules that follow `TrainState.step` and
show in the log, masks by parameter name, and an optimizer from config fields.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import chex
import jax
import jax.numpy as jnp
import ml_collections
import optax

from haikutrain.errors import UsageError
from haikutrain.schedules import warmup_constant, warmup_cosine, warmup_linear

Tree = TypeVar("Tree")


class LearningRateState(NamedTuple):
    """The state of `scale_by_learning_rate`."""

    learning_rate: chex.Array
    """float32 []: the rate of the last update; after `init`, of the first one."""


def scale_by_learning_rate(
    learning_rate: float | chex.Array | optax.Schedule,
) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by `-learning_rate(step)`, where `step` is the TrainState's.

    Put it where `optax.scale_by_learning_rate` would stand, last in an `optax.chain`. It differs in
    two ways: a schedule reads the step of the state rather than a count of its own, so that
    skipped and accumulated steps do not make it lag; and the rate it used is in its state, where
    the log finds it.

    Args:
      learning_rate: a number, or a function from the step (int32 []) to one.

    Returns:
      A transformation whose `update` takes the keyword `step` (int32 []). Updates keep their dtype.

    Raises:
      UsageError: from `update`, if `learning_rate` is a schedule and no `step` is given.
    """

    def rate_at(step: Any) -> chex.Array:
        rate = learning_rate(step) if callable(learning_rate) else learning_rate
        return jnp.asarray(rate, jnp.float32)

    def init(_: Any) -> LearningRateState:
        return LearningRateState(rate_at(jnp.zeros([], jnp.int32)))

    def update(
        updates: Any, state: Any, params: Any = None, *, step: Any = None, **extra_args: Any
    ) -> tuple[Any, LearningRateState]:
        del state, params, extra_args
        if step is None and callable(learning_rate):
            raise UsageError(
                "the learning rate follows the step, and optimizer.update was called without it:"
                " use haikutrain.apply_gradients, or pass step=state.step to update"
            )
        rate = rate_at(step)
        return jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates), LearningRateState(rate)

    return optax.GradientTransformationExtraArgs(init, update)


def find_learning_rate(opt_state: optax.OptState) -> chex.Array | None:
    """The learning rate that `opt_state` holds, or None.

    Looks for the state of `scale_by_learning_rate` and for a hyperparameter `learning_rate` of
    `optax.inject_hyperparams`, however deep; the first in tree order. Only the structure is looked
    at, so it works on traced states too.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: _rate_of(node) is not None)
    return next((_rate_of(node) for node in nodes if _rate_of(node) is not None), None)


def mask_by_name(pattern: str) -> Callable[[Any], Any]:
    """A mask for `optax.masked` and the like: True where a parameter's whole name matches.

    Args:
      pattern: a regular expression that must match all of `"module/parameter"`, for instance
        `"resnet/initial_conv/.*"` or `".*/w"`.

    Returns:
      A function from params (any pytree) to a tree of bool of the same structure.

    Raises:
      UsageError: if the pattern is not a regular expression; from the function, if no parameter
        matches: a mask that silently does nothing is nearly always a misspelt name.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"mask_by_name({pattern!r}): not a regular expression: {error}") from None

    def mask(params: Any) -> Any:
        found = jax.tree.map(lambda name: bool(expression.fullmatch(name)), _names(params))
        names = jax.tree.leaves(_names(params))
        if names and not any(jax.tree.leaves(found)):
            raise UsageError(
                f"mask_by_name({pattern!r}) matches none of the {len(names)} parameters;"
                f" it must match a whole name, such as {names[0]!r}"
            )
        return found

    return mask


def decay_mask(exclude: Sequence[str] = ("b", "offset", "scale")) -> Callable[[Any], Any]:
    """A mask for weight decay: False for the parameters whose last name is in `exclude`.

    The default leaves out Haiku's biases (`b`) and the parameters of its norms (`offset`, `scale`).

    Returns a function from params to a tree of bool, like `mask_by_name`'s.
    """
    if isinstance(exclude, str):
        raise UsageError(f"decay_mask({exclude!r}): give a tuple of names, such as ({exclude!r},)")
    excluded = frozenset(exclude)
    return lambda params: jax.tree.map(
        lambda name: name.rpartition("/")[2] not in excluded, _names(params)
    )


def freeze(
    optimizer: optax.GradientTransformation, frozen: Callable[[Any], Any]
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that leaves some parameters as they are, and keeps no state for them.

    Args:
      optimizer: for the others.
      frozen: a function from params to a tree of bool, such as `mask_by_name("encoder/.*")`.
    """
    return optax.partition(
        {True: optimizer, False: optax.set_to_zero()},
        lambda params: jax.tree.map(lambda stays: not stays, frozen(params)),
    )


def clip_by_global_norm(grads: Tree, max_norm: float, norm: chex.Array) -> Tree:
    """`grads * min(1, max_norm / norm)`, given the norm; each leaf keeps its dtype.

    Args:
      grads: float leaves.
      max_norm: the largest norm to let through, positive.
      norm: float32 [], `optax.tree.norm(grads)`; zero is fine.
    """
    # min(1, max_norm / norm) without dividing by zero.
    factor = max_norm / jnp.maximum(norm, max_norm)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


def ema(average: Tree, new: Tree, decay: float | chex.Array) -> Tree:
    """`decay * average + (1 - decay) * new`, the exponential moving average.

    Float leaves are averaged in float32 (or wider, if they are) and keep the dtype they have in
    `average`. All other leaves (counters, flags, keys) have no mean: they are taken from `new`.
    """

    def leaf(old: Any, value: Any) -> Any:
        if not jnp.issubdtype(old.dtype, jnp.inexact):
            return value
        wide = jnp.promote_types(old.dtype, jnp.float32)
        return (decay * old.astype(wide) + (1 - decay) * value.astype(wide)).astype(old.dtype)

    return jax.tree.map(leaf, average, new)


def optimizer_config() -> ml_collections.ConfigDict:
    """The fields that `make_optimizer` reads, with their defaults."""
    config = ml_collections.ConfigDict()
    config.name = "adam"  # "sgd", "adam", "lars" or "lamb".
    config.learning_rate = 1e-3  # At its peak.
    config.schedule = "cosine"  # After the warm-up: "cosine" or "linear" fall, "constant" stays.
    config.warmup_steps = 0  # Steps in which the learning rate rises linearly from 0.
    config.end_learning_rate = 0.0  # Where "cosine" and "linear" end, at the run's last step.
    config.weight_decay = 0.0  # 0: none. For adam it is decoupled (AdamW).
    config.decay_exclude = ("b", "offset", "scale")  # Parameter names without weight decay.
    config.momentum = 0.9  # sgd and lars; 0: none.
    config.nesterov = False  # sgd and lars.
    config.b1 = 0.9  # adam and lamb: decay of the gradients' mean.
    config.b2 = 0.999  # adam and lamb: decay of the squared gradients' mean.
    config.eps = 1e-8  # adam and lamb: added to the root of the latter.
    config.trust_coefficient = 1e-3  # lars.
    return config


def make_optimizer(
    config: ml_collections.ConfigDict, num_steps: int
) -> optax.GradientTransformationExtraArgs:
    """The optimizer that the fields of `optimizer_config()` describe.

    With gradient g, parameters p, weight decay d (0 where masked) and learning rate r:

        sgd:   m = momentum * m + g + d * p;  p -= r * m
        adam:  p -= r * (adam(g) + d * p)
        lars:  u = g + d * p;  m = momentum * m + r * u * trust_coefficient * |p| / |u|;  p -= m
        lamb:  u = adam(g) + d * p;  p -= r * u * |p| / |u|

    `lars` leaves parameters named in `decay_exclude` out of the scaling by |p| / |u|, too.

    Args:
      config: from `optimizer_config()`, with changes.
      num_steps: where the schedule ends, usually the run's `num_steps`.

    Returns:
      A transformation whose `update` wants `step=` (see `scale_by_learning_rate`).

    Raises:
      UsageError: naming the field that is unknown, out of range, or of no effect.
    """
    _check_config(config)
    decayed = decay_mask(config.decay_exclude)
    decay = trace = optax.identity()
    if config.weight_decay:
        decay = optax.add_decayed_weights(config.weight_decay, decayed)
    if config.momentum:
        trace = optax.trace(config.momentum, config.nesterov)
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    trust = optax.scale_by_trust_ratio(trust_coefficient=config.trust_coefficient)
    rate = scale_by_learning_rate(_schedule(config, num_steps))
    parts = {
        "sgd": (decay, trace, rate),
        "adam": (adam, decay, rate),
        "lars": (decay, optax.masked(trust, decayed), rate, trace),
        "lamb": (adam, decay, optax.scale_by_trust_ratio(), rate),
    }
    return optax.chain(*parts[config.name])


_OWN_FIELDS = {
    "sgd": ("momentum", "nesterov"),
    "adam": ("b1", "b2", "eps"),
    "lars": ("momentum", "nesterov", "trust_coefficient"),
    "lamb": ("b1", "b2", "eps"),
}
_CHOICES = {"name": tuple(_OWN_FIELDS), "schedule": ("cosine", "linear", "constant")}
_RANGES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("more than 0", lambda x: 0 < x < math.inf, ("learning_rate", "trust_coefficient")),
    ("0 or more", lambda x: 0 <= x < math.inf, ("end_learning_rate", "weight_decay", "eps")),
    ("at least 0 and less than 1", lambda x: 0 <= x < 1, ("momentum", "b1", "b2")),
)


def _check_config(config: ml_collections.ConfigDict) -> None:
    default = optimizer_config()
    for field in sorted(set(config) ^ set(default)):
        if field in default:
            _refuse(field, "missing; start from haikutrain.optimizer_config()")
        _refuse(field, f"there is no such field{_nearest(field, default)}")
    for field, choices in _CHOICES.items():
        value = config[field]
        if value not in choices:
            _refuse(f"{field}={value!r}", f"must be one of {choices}{_nearest(value, choices)}")
    for rule, holds, fields in _RANGES:
        for field in fields:
            if not holds(config[field]):
                _refuse(f"{field}={config[field]}", f"must be {rule}")
    for field in sorted(set().union(*_OWN_FIELDS.values()) - set(_OWN_FIELDS[config.name])):
        if config[field] != default[field]:
            why = f"does nothing with name={config.name!r}; leave it at {default[field]}"
            _refuse(f"{field}={config[field]}", why)
    if config.nesterov and not config.momentum:
        _refuse("nesterov=True", "does nothing with momentum=0")
    if config.schedule == "constant" and config.end_learning_rate:
        _refuse("end_learning_rate", "does nothing with schedule='constant'; leave it at 0.0")


def _refuse(what: str, why: str) -> NoReturn:
    raise UsageError(f"optimizer config: {what}: {why}")


def _nearest(name: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(choices), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _schedule(config: ml_collections.ConfigDict, num_steps: int) -> optax.Schedule:
    if config.schedule == "constant":
        return warmup_constant(config.learning_rate, config.warmup_steps)
    fall = {"cosine": warmup_cosine, "linear": warmup_linear}[config.schedule]
    return fall(config.learning_rate, num_steps, config.warmup_steps, config.end_learning_rate)


def _rate_of(node: Any) -> chex.Array | None:
    if isinstance(node, LearningRateState):
        return node.learning_rate
    hyperparams = getattr(node, "hyperparams", None)
    return hyperparams.get("learning_rate") if isinstance(hyperparams, Mapping) else None


def _names(params: Any) -> Any:
    """The tree of `"module/parameter"` names."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), params
    )
