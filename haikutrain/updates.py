"""What an update is made of: the step, the gradients' way into the state, averaged weights."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import optax

from haikutrain import collectives, nonfinite, optimizers, precision
from haikutrain.errors import UsageError
from haikutrain.train_state import TrainState

State = TypeVar("State", bound=TrainState)

# --- what a function of an experiment may ask while the framework traces it ------------------


@dataclasses.dataclass
class _Scope:
    step: Any
    config: Any
    used: set[str]


_scope: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("scope", default=None)


@contextlib.contextmanager
def tracing(step: Any, config: Any) -> Iterator[set[str]]:
    """Binds `step()` and the config that the helpers read.

    Yields:
      The names of the config fields that were applied: filled while the function is traced.
    """
    scope = _Scope(step, config, set())
    token = _scope.set(scope)
    try:
        yield scope.used
    finally:
        _scope.reset(token)


def step() -> jax.Array:
    """The step, int32 []: batches consumed before this one; 0 in `init`.

    To be called inside an experiment's `loss`, `init`, `update` or `evaluate`.
    """
    scope = _scope.get()
    if scope is None:
        raise UsageError(
            "haikutrain.step() was called outside of an experiment's loss, init, update and "
            "evaluate; elsewhere read state.step"
        )
    return scope.step


def setting(field: str) -> Any:
    """The value of a config field that the calling helper applies; None outside of a run."""
    scope = _scope.get()
    if scope is None:
        return None
    scope.used.add(field)
    return scope.config[field]


# --- helpers ---------------------------------------------------------------------------------


def apply_gradients(
    state: State,
    grads: Any,
    *,
    network_state: Any,
    optimizer: optax.GradientTransformation,
    metrics: Mapping[str, Any] | None = None,
) -> tuple[State, dict[str, jax.Array]]:
    """Averages over the devices, clips, and takes one step of the optimizer.

    In this order: one packed mean over the devices of the gradients, the float leaves of the
    network state and the metrics; the gradients' global norm; clipping by
    `config.grad_clip_norm`; the optimizer; the averages of `config.ema_decay`. To be called in
    `update`, once. The optimizer is given `step=` besides, for those that follow the step.

    Args:
      state: the state before.
      grads: this device's gradients, a tree like `state.params`.
      network_state: this device's network state after its batch.
      optimizer: the one that made `state.opt_state`.
      metrics: scalars [] of this device, to be averaged along.

    Returns:
      The state after, and the averaged metrics with `grad_norm`, the norm before clipping. With
      a loss scale also `loss_scale`; a step whose gradients overflow only lowers it, changes
      nothing else, and counts as 0 in `grad_norm`. `nonfinite_leaves` and `nonfinite_first` are
      for the framework, which takes them out: how many leaves' gradients are not finite, and the
      number of the first one.
    """
    chex.assert_trees_all_equal_shapes(grads, state.params)
    grads, network_state, averages = collectives.pmean((grads, network_state, dict(metrics or {})))
    squares = jnp.stack([_square(leaf) for leaf in jax.tree.leaves(grads)] or [jnp.float32(0)])
    norm = jnp.sqrt(squares.sum())
    bad = ~jnp.isfinite(squares)
    found = {nonfinite.LEAVES: bad.sum(dtype=jnp.int32), nonfinite.FIRST: jnp.argmax(bad)}
    max_norm = setting("grad_clip_norm")
    if max_norm is not None:
        grads = optimizers.clip_by_global_norm(grads, max_norm, norm)
    changes, opt_state = optax.with_extra_args_support(optimizer).update(
        grads, state.opt_state, state.params, step=state.step
    )
    params = optax.apply_updates(state.params, changes)
    extras = dict(state.extras)
    decay = setting("ema_decay")
    if decay is not None:
        new = {"params": params, "network_state": network_state}
        extras["ema"] = optimizers.ema(extras["ema"], new, decay)
    new_state = state.replace(
        params=params, network_state=network_state, opt_state=opt_state, extras=extras
    )
    if "loss_scale" in extras:
        return _scaled_step(state, new_state, norm, {**averages, **found})
    return new_state, {**averages, "grad_norm": norm, **found}


def _scaled_step(old: State, new: State, norm: jax.Array, metrics: dict[str, Any]) -> Any:
    """The result of `apply_gradients` where there is a loss scale."""
    finite = jnp.isfinite(norm)
    before = old.extras["loss_scale"]
    scale = precision.adjusted_loss_scale(before, finite)
    # Decided after the reduction, so that all devices agree; then all is kept as it was.
    kept = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    # A scale that cannot be lowered any more does not mend it.
    handled = scale["scale"] < before["scale"]
    found = {
        name: jnp.where(handled, 0, metrics[name]) for name in (nonfinite.LEAVES, nonfinite.FIRST)
    }
    norm = jnp.where(handled, 0.0, norm)
    values = {**metrics, "grad_norm": norm, "loss_scale": scale["scale"], **found}
    return kept.replace(extras={**kept.extras, "loss_scale": scale}), values


def _square(leaf: jax.Array) -> jax.Array:
    """The square of the leaf's norm, float32 []: half precision would overflow at a norm of 256."""
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    return (jnp.abs(wide) ** 2).sum().astype(jnp.float32)


def initial_extras(state: TrainState, config: Any) -> dict[str, Any]:
    """What the framework carries in `TrainState.extras`.

    `ema`, with `config.ema_decay`: averages, which begin at the values. `loss_scale`, where
    `config.precision` computes in float16: what losses are multiplied with before the gradient.
    """
    extras: dict[str, Any] = {}
    if config.ema_decay is not None:
        extras["ema"] = {"params": state.params, "network_state": state.network_state}
    scale = precision.initial_loss_scale(config.precision)
    if scale is not None:
        extras["loss_scale"] = scale
    return extras


def averaged(state: State) -> State:
    """The state with the averaged params and network state, where `config.ema_decay` keeps them."""
    setting("ema_decay")
    return state.replace(**state.extras["ema"]) if "ema" in state.extras else state


def scale_loss(state: TrainState, loss: jax.Array) -> jax.Array:
    """The loss times the loss scale, where there is one: small gradients vanish in float16."""
    scale = state.extras.get("loss_scale")
    return loss if scale is None else loss * scale["scale"]


def unscale(state: TrainState, grads: Any) -> Any:
    """The gradients of the loss, from those of `scale_loss`."""
    scale = state.extras.get("loss_scale")
    if scale is None:
        return grads
    return jax.tree.map(lambda g: (g.astype(jnp.float32) / scale["scale"]).astype(g.dtype), grads)
