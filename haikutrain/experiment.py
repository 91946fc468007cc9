"""Experiment: what to train. Four methods to write, four more to redefine.

The base class turns `loss` into `init`, `update` and `evaluate`. The helpers that it uses,
`Experiment.gradients`, `haikutrain.apply_gradients` and `haikutrain.averaged`, are there for
redefined ones too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from haikutrain import devices, precision, updates
from haikutrain.errors import UsageError
from haikutrain.metrics import Rows
from haikutrain.train_state import TrainState
from haikutrain.updates import apply_gradients, averaged, setting


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
          each `[B]` or `[]`, or `haikutrain.Rows`. Values an example make evaluation exact over a
          ragged last batch.
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
        opt_state = checked_optimizer(self).init(params)
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
            state,
            grads,
            network_state=network_state,
            optimizer=checked_optimizer(self),
            metrics=metrics,
        )

    def evaluate(self, state: Any, batch: Any, rngs: hk.PRNGSequence) -> dict[str, Any]:
        """The metrics of a batch: pure; runs pmapped; the state is not changed.

        Args:
          state: a state; replicated.
          batch: this device's part of the batch, arrays `[B, ...]`.
          rngs: keys of this device and this batch, the same in every evaluation.

        Returns:
          A dict of values `[B]`, one an example, or `[]`, the mean of the batch; not reduced over
          devices. The framework leaves padding rows out and averages over the whole split. Values
          in `haikutrain.Rows` are kept row by row.
        """
        network = hk.transform_with_state(self._forward(is_training=False))
        key = next(rngs)

        def values(state: TrainState) -> dict[str, Any]:
            return network.apply(state.params, state.network_state, key, batch)[0]

        if not setting("eval_raw"):
            return values(averaged(state))
        raw = {f"raw_{name}": value for name, value in values(state).items()}
        return {**values(averaged(state)), **raw}

    def warm_start(self, state: Any, saved: Mapping[str, Any]) -> Any:
        """What a run takes from another's checkpoint; called only if redefined.

        With `config.restore_from` and `restore_only="weights"`. Without it, params and network
        state are taken whole, and must be the same in both.

        Args:
          state: the new run's state at step 0.
          saved: the checkpoint's arrays by path, such as `params/encoder/linear/w`.

        Returns:
          `state` with what was taken: see `haikutrain.take`.
        """
        return state

    def report(self, state: Any, split: str, rows: Mapping[str, Any]) -> Mapping[str, Any]:
        """What else there is to say of a split: metrics that are not means, pictures, texts.

        Called on the host after each evaluation of a split.

        Args:
          state: the state that was evaluated, on the devices.
          split: its name.
          rows: NumPy arrays `[N, ...]` of what `evaluate` returned in `haikutrain.Rows`: every
            example of the split once, in order.

        Returns:
          A dict of floats, which join the split's metrics; of pictures, arrays `[H, W]` or
          `[H, W, 1 or 3]`, uint8 or float in [0, 1]; and of texts.
        """
        return {}

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
            return updates.scale_loss(state, means["loss"]), (network_state, means)

        def grad(*arguments: Any) -> Any:
            grads, aux = jax.grad(mean_loss, has_aux=True)(*arguments)
            return updates.unscale(state, grads), aux

        count = setting("accumulate_steps") or 1
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

    def _forward(self, *, is_training: bool) -> Callable[[Any], dict[str, Any]]:
        """`loss` as a Haiku function to metrics by name, `loss` among them, float32."""
        policy = precision.policy(setting("precision"))

        def forward(batch: Any) -> dict[str, Any]:
            with precision.applied(policy):
                result = self.loss(batch, is_training)
            values = _checked_metrics(result, batch, type(self).__name__)
            if is_training:
                return {k: value for k, value in values.items() if not isinstance(value, Rows)}
            return values

        return forward


def checked_optimizer(experiment: Experiment) -> optax.GradientTransformation:
    """The experiment's optimizer; raises UsageError if that is none."""
    optimizer = experiment.optimizer()
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise UsageError(
            f"{type(experiment).__name__}.optimizer returned {optimizer!r}; return an optax "
            "transformation, such as optax.adam(1e-3)"
        )
    return optimizer


_RESERVED = ("loss", "grad_norm", "learning_rate", "skipped", "step", "split")


def _checked_metrics(result: Any, batch: Any, owner: str) -> dict[str, Any]:
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
        if not isinstance(name, str):
            raise UsageError(f"{owner}.loss: a metric is named {name!r}; names must be strings")
        if isinstance(value, str) or value is None:
            raise UsageError(f"{owner}.loss: {name!r} is {value!r}; metrics are arrays of numbers")
        if not isinstance(value, Rows) and jnp.shape(value) not in ((), (rows,)):
            raise UsageError(
                f"{owner}.loss: {name!r} has shape {list(jnp.shape(value))}; give one value an "
                f"example, [{rows}], the batch's mean, [], or haikutrain.Rows"
            )
    return {
        name: value if isinstance(value, Rows) else jnp.asarray(value).astype(jnp.float32)
        for name, value in values.items()
    }
