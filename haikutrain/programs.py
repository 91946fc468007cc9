"""An experiment's functions as programs on devices, and what the framework does around them.

Each is traced once, before anything is compiled, so that a mistake in an experiment is found at
the start and so that the state's shapes are known before a checkpoint is opened.
"""

import functools
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from haikutrain import (
    collectives,
    devices,
    leaves,
    metrics,
    nonfinite,
    optimizers,
    precision,
    returned,
    updates,
)
from haikutrain.errors import UsageError
from haikutrain.eval_feed import EvalItem
from haikutrain.experiment import Experiment
from haikutrain.feed import TrainItem
from haikutrain.train_state import TrainState

# The config fields that reach an update through the helpers it calls, and where they are off.
_SHAPING = {
    "accumulate_steps": (1, "Experiment.gradients"),
    "precision": (None, "Experiment.gradients"),
    "grad_clip_norm": (None, "haikutrain.apply_gradients"),
    "ema_decay": (None, "haikutrain.apply_gradients"),
}
_SHAPING_EVALUATE = {
    "eval_raw": (False, "Experiment.evaluate of the base class"),
    "ema_decay": (None, "haikutrain.averaged"),
}


class Programs:
    """The pmapped init, update and evaluate of an experiment.

    Args:
      task: the experiment.
      first_batch: this process's part of the first training batch, `[B, ...]`, on the host.

    Attributes:
      state: the TrainState's `jax.ShapeDtypeStruct`s.
      skips: whether steps that are not finite are left out.

    Raises:
      UsageError: the experiment's init returns what cannot be trained.
    """

    def __init__(self, task: Experiment, first_batch: Any):
        self._task = task
        self._owner = type(task).__name__
        self._seed = devices.place(np.uint32(task.config.seed))
        self._first = devices.place_batch(first_batch)
        self._init = devices.Program(
            self._init_function, (self._seed, self._first), in_axes=(None, 0)
        )
        self.state: TrainState = self._init.output
        if precision.policy(task.config.precision) is not None:
            precision.check_network_state(self.state.network_state)
        self.skips: bool = task.config.on_nonfinite == "skip"
        self._updates: dict[tuple[int, int, bool], devices.Program] = {}
        self._evaluates: dict[Any, tuple[devices.Program, dict[str, Any]]] = {}

    # --- init ---

    def _init_function(self, seed: jax.Array, batch: Any) -> TrainState:
        key, train_key, _ = _first_keys(seed)
        with updates.tracing(jnp.int32(0), self._task.config):
            state = self._task.init(hk.PRNGSequence(key), batch)
        if not isinstance(state, TrainState):
            raise UsageError(
                f"{self._owner}.init returned a {type(state).__name__}; return a "
                "haikutrain.TrainState"
            )
        state = self.with_fresh_extras(state).replace(step=jnp.int32(0), rng=train_key)
        return collectives.broadcast(jax.tree.map(_strong, state))

    def compile_ahead(self, steps: int, group: int, arrays: Any) -> None:
        """Begins to compile init and the update of such items at the same time."""
        self._init.compile_ahead()
        self._update_program(steps, group, arrays).compile_ahead()

    def init(self) -> TrainState:
        """The state at step 0, on the devices; compiles."""
        state = self._init(self._seed, self._first)
        # Two fields may share a buffer (a target network that begins as a copy), and donating a
        # buffer twice kills the process: `place` gives each leaf its own.
        return jax.tree.map(lambda leaf: devices.place(leaf.addressable_data(0)), state)

    def with_fresh_extras(self, state: TrainState) -> TrainState:
        """The state with the framework's `extras` as they begin at its weights."""
        return state.replace(extras=updates.initial_extras(state, self._task.config))

    # --- update ---

    @functools.cached_property
    def _step(self) -> devices.Traced:
        part = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._first)
        keys = jax.eval_shape(_step_keys, self.state.rng)
        return devices.Traced(self._step_function, self.state, part, keys)

    def _step_function(
        self, state: TrainState, batch: Any, keys: tuple[jax.Array, jax.Array]
    ) -> tuple[TrainState, dict[str, Any], nonfinite.Found]:
        step_key, rng = keys
        own = hk.PRNGSequence(jax.random.fold_in(step_key, lax.axis_index(collectives.AXIS)))
        with updates.tracing(state.step, self._task.config) as used:
            result = self._task.update(state, batch, own)
        self._check_used(used, _SHAPING, "update")
        if not (isinstance(result, tuple) and len(result) == 2):
            raise UsageError(f"{self._owner}.update must return (state, metrics)")
        new, values = result
        returned.check_scalars(values, self._owner)
        found = nonfinite.find(values)
        values = {k: v for k, v in values.items() if k not in (nonfinite.LEAVES, nonfinite.FIRST)}
        if self.skips and not values.keys() & set(nonfinite.JUDGED):
            raise UsageError(
                f"config.on_nonfinite='skip' would do nothing: {self._owner}.update returns no "
                "metric called loss or grad_norm (haikutrain.apply_gradients does) that would say "
                "which steps to skip"
            )
        learning_rate = optimizers.find_learning_rate(new.opt_state)
        if learning_rate is not None:
            values = {"learning_rate": learning_rate, **values}
        new = jax.tree.map(_strong, new.replace(step=state.step + 1, rng=rng))
        returned.check_unchanged(state, new, self._owner)
        if self.skips:
            new = _kept(state, new, found.bad)
        return new, {k: jnp.asarray(v).astype(jnp.float32) for k, v in values.items()}, found

    def _check_used(self, used: set[str], fields: Mapping[str, Any], method: str) -> None:
        for field, (off, helper) in fields.items():
            value = self._task.config[field]
            if value != off and field not in used:
                raise UsageError(
                    f"config.{field}={value!r} would do nothing: {self._owner}.{method} does not "
                    f"call {helper}, which applies it; call it, or leave the field out"
                )

    def trace_update(self) -> None:
        """Raises UsageError for what the experiment's update does wrong."""
        _ = self._step

    @property
    def metric_names(self) -> list[str]:
        """The training metrics, in the order of a window's sums. Traces the update."""
        return list(self._step.output[1])

    def update(self, state: TrainState, sums: jax.Array, item: TrainItem) -> tuple[Any, jax.Array]:
        """Takes the item's steps; `state` is donated. Returns the state and the window's sums."""
        program = self._update_program(item.steps, item.group, item.arrays)
        arrays = () if item.arrays is None else (item.arrays,)
        return program(state, sums, item.placed, *arrays)

    def executable(self, item: TrainItem) -> Any:
        """The update of such items compiled, which knows its memory and FLOPs; compiles."""
        return self._update_program(item.steps, item.group, item.arrays).executable()

    def _update_program(self, steps: int, group: int = 1, arrays: Any = None) -> devices.Program:
        """Takes `steps` batches, or of a `group` the step's own; or rows of `arrays`."""
        form = steps, group, arrays is not None
        if form not in self._updates:

            def function(state: Any, sums: Any, batch: Any, *arrays: Any) -> Any:
                def one(carry: Any, xs: Any) -> tuple[Any, None]:
                    batch, keys = xs
                    batch = devices.rows_of(arrays[0], batch) if arrays else batch
                    state, values, found = self._step(carry[0], batch, keys)
                    sums = metrics.accumulate(carry[1], values, found, skips=self.skips)
                    return (state, sums), None

                if group > 1:
                    own = lax.rem(state.step, jnp.int32(group))
                    batch = jax.tree.map(
                        lambda x: lax.dynamic_index_in_dim(x, own, 0, False), batch
                    )
                if steps == 1:
                    return one((state, sums), (batch, _step_keys(state.rng)))[0]
                # All keys first: on CPU a loop in the loop takes as long as many other parts.
                _, keys = lax.scan(_next_keys, state.rng, length=steps)
                return devices.scan(one, (state, sums), (batch, keys), steps)[0]

            batch = self._first
            if arrays is not None:
                batch = jax.ShapeDtypeStruct(jax.tree.leaves(batch)[0].shape[:2], jnp.int32)
            stacked = steps * group  # One of the two is 1.
            batch = batch if stacked == 1 else _stacked_shapes(batch, stacked)
            given = [self.state, metrics.empty_window(self.metric_names), batch]
            given += [] if arrays is None else [arrays]
            in_axes = (None, None, int(stacked > 1), None)[: len(given)]
            self._updates[form] = devices.Program(function, given, in_axes=in_axes, donate=(0,))
        return self._updates[form]

    # --- evaluate ---

    def evaluate_names(self, item: EvalItem) -> list[str]:
        """The metrics of batches that look like `item`. Traces the evaluation."""
        return list(self._evaluate_program(item)[1])

    def keeps_rows(self, item: EvalItem) -> bool:
        """Whether batches that look like `item` have values that are kept row by row."""
        return "rows" in self._evaluate_program(item)[0].output

    def check_exact(self, split: str, item: EvalItem, *, padded: bool) -> None:
        """Raises UsageError if a metric is the mean of a batch, and batches are padded."""
        values = self._evaluate_program(item)[1]
        means = [name for name, value in values.items() if value.ndim == 0]
        if padded and means:
            raise UsageError(
                f"evaluation of {split!r}: {means} are means of a batch, and the last batch is "
                "padded, so that they cannot be exact; return one value an example, [B], or make "
                "the split a multiple of its batch size"
            )

    def evaluate(self, state: TrainState, split: str, item: EvalItem) -> dict[str, Any]:
        """Evaluates one batch, on the devices.

        Returns:
          `sums` of each metric over the real rows, and their `count`. If there are values to keep,
          `rows`, `[B, ...]` of all devices with padding, and `mask`, bool `[B]`.

        Raises:
          UsageError: a metric is the batch's mean, and the batch is padded.
        """
        self.check_exact(split, item, padded=item.padded)
        program, _ = self._evaluate_program(item)
        return program(state, self._evaluation_key, item.batch, item.mask, item.index)

    @functools.cached_property
    def _evaluation_key(self) -> jax.Array:
        return devices.place(_first_keys(self._seed)[-1])

    def _evaluate_program(self, item: EvalItem) -> tuple[devices.Program, dict[str, Any]]:
        leaves, treedef = jax.tree.flatten(item.batch)
        looks = (treedef, *((x.shape, x.dtype) for x in leaves))
        if looks not in self._evaluates:
            parts = (item.batch, item.mask, item.index)
            local = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
            key = jax.eval_shape(_first_keys, self._seed)[-1]
            traced = devices.Traced(self._evaluate_function, self.state, key, local[0], local[2])
            means, kept = traced.output
            returned.check_rows(means, kept, local[1].shape, self._owner)

            def function(state: Any, key: Any, batch: Any, mask: Any, index: Any) -> Any:
                values, rows = traced(state, key, batch, index)
                sums = metrics.masked_sums(values, mask)
                reduced = collectives.psum({"sums": sums, "count": mask.sum(dtype=jnp.float32)})
                gathered = collectives.gather({"rows": rows, "mask": mask}) if rows else {}
                return {**reduced, **gathered}

            program = devices.Program(
                function, (self.state, key, *parts), in_axes=(None, None, 0, 0, 0)
            )
            self._evaluates[looks] = program, means
        return self._evaluates[looks]

    def _evaluate_function(
        self, state: Any, key: Any, batch: Any, index: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values to average, and those to keep."""
        key = jax.random.fold_in(key, index[0])
        rngs = hk.PRNGSequence(jax.random.fold_in(key, lax.axis_index(collectives.AXIS)))
        with updates.tracing(state.step, self._task.config) as used:
            values = self._task.evaluate(state, batch, rngs)
        self._check_used(used, _SHAPING_EVALUATE, "evaluate")
        if not isinstance(values, Mapping):
            raise UsageError(
                f"{self._owner}.evaluate returned a {type(values).__name__}; return a dict of "
                "metrics"
            )
        kept = {k: value.values for k, value in values.items() if isinstance(value, metrics.Rows)}
        means = {k: jnp.asarray(value) for k, value in values.items() if k not in kept}
        return means, {name: jnp.asarray(value) for name, value in kept.items()}


def _kept(old: TrainState, new: TrainState, bad: jax.Array) -> TrainState:
    """The new state, or where the step was bad the old one: all of it together but the clock."""
    kept = jax.tree.map(lambda n, o: jnp.where(bad, o, n), new, old)
    extras = kept.extras
    if "loss_scale" in extras:
        extras = {**extras, "loss_scale": new.extras["loss_scale"]}
    return kept.replace(step=new.step, rng=new.rng, extras=extras)


@jax.jit
def _first_keys(seed: jax.Array) -> tuple[jax.Array, ...]:
    """Of init, training and evaluation: in this order for ever, a new one comes last."""
    # As one program, for each of its parts compiles longer than all of them in one.
    return hk.PRNGSequence(jax.random.PRNGKey(seed)).take(3)


def _step_keys(rng: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step's own key, and the sequence's key after it."""
    sequence = hk.PRNGSequence(rng)
    # `take`, for `next` reserves as many keys as Haiku's config says.
    (step_key,) = sequence.take(1)
    after, _ = sequence.internal_state
    return step_key, after


def _next_keys(rng: jax.Array, _: None) -> tuple[jax.Array, Any]:
    keys = _step_keys(rng)
    return keys[1], keys


def _strong(leaf: Any) -> jax.Array:
    """Without a weak type, which would make the next call another trace."""
    if leaves.is_key(leaf):
        return leaf
    return lax.convert_element_type(leaf, jnp.result_type(leaf))


def _stacked_shapes(batch: Any, steps: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((steps, *x.shape), x.dtype), batch)
