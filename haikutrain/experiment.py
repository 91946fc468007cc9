"""Experiment: what to train. Four methods to write, four more to redefine.

The base class turns `loss` into `init`, `update` and `evaluate`. The helpers that it uses,
`Experiment.gradients`, `apply_gradients` and `averaged`, are there for redefined ones too.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import optax

from haikutrain import collectives, devices, optimizers, precision
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


def _setting(field: str) -> Any:
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
      The state after, and the averaged metrics with `grad_norm`, the norm before clipping.
    """
    chex.assert_trees_all_equal_shapes(grads, state.params)
    grads, network_state, averages = collectives.pmean((grads, network_state, dict(metrics or {})))
    norm = optax.tree.norm(grads)
    max_norm = _setting("grad_clip_norm")
    if max_norm is not None:
        grads = optimizers.clip_by_global_norm(grads, max_norm, norm)
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        grads, state.opt_state, state.params, step=state.step
    )
    params = optax.apply_updates(state.params, updates)
    extras = dict(state.extras)
    decay = _setting("ema_decay")
    if decay is not None:
        new = {"params": params, "network_state": network_state}
        extras["ema"] = optimizers.ema(extras["ema"], new, decay)
    new_state = state.replace(
        params=params, network_state=network_state, opt_state=opt_state, extras=extras
    )
    return new_state, {**averages, "grad_norm": norm}


def initial_extras(state: TrainState, config: Any) -> dict[str, Any]:
    """What the framework carries in `TrainState.extras`: averages that begin at the values."""
    if config.ema_decay is None:
        return {}
    return {"ema": {"params": state.params, "network_state": state.network_state}}


def averaged(state: State) -> State:
    """The state with the averaged params and network state, where `config.ema_decay` keeps them."""
    return state.replace(**state.extras["ema"]) if "ema" in state.extras else state


class Experiment:
    """What to train. Subclass it and write `loss`, `optimizer`, `train_data` and `eval_data`.

    For training that is not one loss and one optimizer redefine `init`, `update` and `evaluate`;
    then `loss` and `optimizer` are needed only by what still uses them.

    An experiment holds no arrays: all that training changes is in the TrainState.

    Attributes:
      config: the run's `ml_collections.ConfigDict`, made from `haikutrain.base_config()`.
    """

    def __init__(self, config: Any):
        self.config = config

    # --- to write ---

    def loss(self, batch: Any, is_training: bool) -> tuple[Any, dict[str, Any]]:
        """The loss and other metrics of a batch: a Haiku function.

        Modules, `hk.get_state` and `hk.next_rng_key` may be used in it freely.

        Args:
          batch: this device's part of a batch, arrays `[B, ...]`.
          is_training: a Python bool.

        Returns:
          Losses `[B]`, one an example, or `[]`, the batch's mean; and a dict of further metrics,
          each `[B]` or `[]`. Values an example make evaluation exact over a ragged last batch.
        """
        raise UsageError(f"{type(self).__name__} defines no loss(batch, is_training)")

    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer: any of optax's."""
        raise UsageError(f"{type(self).__name__} defines no optimizer()")

    def train_data(self) -> Any:
        """The training dataset, of either protocol of `haikutrain.data`."""
        raise UsageError(f"{type(self).__name__} defines no train_data()")

    def eval_data(self) -> Any:
        """The evaluation dataset, or a dict of them by split name. Without any: `{}`."""
        return {}

    # --- to redefine ---

    def init(self, rngs: hk.PRNGSequence, batch: Any) -> TrainState:
        """The state at step 0; runs pmapped, with equal keys on all devices.

        Args:
          rngs: keys, as many as wanted.
          batch: this device's part of the first training batch, which is not consumed.
        """
        network = hk.transform_with_state(self._forward(is_training=True))
        params, network_state = network.init(next(rngs), batch)
        opt_state = self.optimizer().init(params)
        return TrainState(params=params, network_state=network_state, opt_state=opt_state)

    def update(
        self, state: Any, batch: Any, rngs: hk.PRNGSequence
    ) -> tuple[TrainState, dict[str, Any]]:
        """One step: pure; runs pmapped over the axis `haikutrain.AXIS`.

        What it returns must be equal on all devices: computed from averages (`apply_gradients`,
        `haikutrain.pmean`). The framework sets `step` and `rng`.

        Args:
          state: the state before; replicated.
          batch: this device's part of the batch, arrays `[B, ...]`.
          rngs: keys of this device and this step, as many as wanted.

        Returns:
          The state after, of the same structure, shapes and dtypes; and metrics, scalars [].
        """
        grads, network_state, metrics = self.gradients(state, batch, rngs)
        return apply_gradients(
            state, grads, network_state=network_state, optimizer=self.optimizer(), metrics=metrics
        )

    def evaluate(self, state: Any, batch: Any, rngs: hk.PRNGSequence) -> dict[str, Any]:
        """The metrics of a batch: pure; runs pmapped; the state is not changed.

        Args:
          state: a state; replicated.
          batch: this device's part of the batch, arrays `[B, ...]`.
          rngs: keys of this device and this batch, the same in every evaluation.

        Returns:
          A dict of values `[B]`, one an example, or `[]`, the mean of the batch; not reduced over
          devices. The framework leaves padding rows out and averages over the whole split.
        """
        state = averaged(state)
        network = hk.transform_with_state(self._forward(is_training=False))
        values, _ = network.apply(state.params, state.network_state, next(rngs), batch)
        return values

    def hooks(self) -> Sequence[Callable[[Any], None]]:
        """Hooks of one's own: functions of a `haikutrain.StepInfo`, called after every update."""
        return []

    # --- helpers of the methods above ---

    def gradients(
        self, state: TrainState, batch: Any, rngs: hk.PRNGSequence
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        """The gradients of `loss` on this device's batch, not yet averaged over devices.

        Applies `config.precision`, and `config.accumulate_steps`: then the batch passes in that
        many parts, one after the other, each with keys of its own; gradients and metrics are
        their means, and the network state is handed from part to part.

        Returns:
          Gradients like `state.params`, the network state after, and metrics [] with `loss`.
        """
        network = hk.transform_with_state(self._forward(is_training=True))

        def mean_loss(params: Any, network_state: Any, key: Any, part: Any) -> Any:
            values, network_state = network.apply(params, network_state, key, part)
            means = {name: value.mean() for name, value in values.items()}
            return means["loss"], (network_state, means)

        grad = jax.grad(mean_loss, has_aux=True)
        count = _setting("accumulate_steps") or 1
        if count == 1:
            grads, (network_state, means) = grad(
                state.params, state.network_state, next(rngs), batch
            )
            return grads, network_state, means

        def one_part(network_state: Any, xs: Any) -> Any:
            grads, (network_state, means) = grad(state.params, network_state, *xs)
            return network_state, (grads, means)

        parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        keys = jnp.stack(rngs.take(count))
        first = jax.tree.map(lambda x: x[0], (keys, parts))
        traced = devices.Traced(one_part, state.network_state, first, inside=True)
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), traced.output[1])

        def accumulate(carry: Any, xs: Any) -> Any:
            network_state, sums = carry
            network_state, new = traced(network_state, xs)
            return (network_state, jax.tree.map(jnp.add, sums, new)), None

        carry = (state.network_state, sums)
        (network_state, sums), _ = devices.scan(accumulate, carry, (keys, parts), count)
        grads, means = jax.tree.map(lambda x: (x / count).astype(x.dtype), sums)
        return grads, network_state, means

    def _forward(self, *, is_training: bool) -> Callable[[Any], dict[str, jax.Array]]:
        """`loss` as a Haiku function to metrics by name, `loss` among them, float32."""
        policy = precision.policy(_setting("precision"))

        def forward(batch: Any) -> dict[str, jax.Array]:
            with precision.applied(policy):
                result = self.loss(batch, is_training)
            return _checked_metrics(result, batch, type(self).__name__)

        return forward


_RESERVED = ("loss", "grad_norm", "learning_rate", "step", "split")


def _checked_metrics(result: Any, batch: Any, owner: str) -> dict[str, jax.Array]:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise UsageError(
            f"{owner}.loss returned a {type(result).__name__}; return (losses, metrics), with a "
            "dict of metrics, which may be empty"
        )
    losses, metrics = result
    taken = sorted(set(metrics) & set(_RESERVED))
    if taken:
        raise UsageError(f"{owner}.loss: the metric names {taken} are the framework's; rename them")
    rows = jax.tree.leaves(batch)[0].shape[0]
    values = {"loss": losses, **metrics}
    for name, value in values.items():
        if jnp.shape(value) not in ((), (rows,)):
            raise UsageError(
                f"{owner}.loss: {name!r} has shape {list(jnp.shape(value))}; give one value an "
                f"example, [{rows}], or the batch's mean, []"
            )
    return {name: jnp.asarray(value).astype(jnp.float32) for name, value in values.items()}
