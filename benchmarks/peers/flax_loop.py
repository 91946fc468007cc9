"""The loop in the shape of Flax's pmapped examples, with Flax's own parts (`pip install flax`).

`flax.training.train_state`, `flax.jax_utils.replicate` and `prefetch_to_device`, metrics kept on
the devices and fetched every 50 steps by `common_utils.get_metrics`, a checkpoint of
`flax.training.checkpoints` every 500; BatchNorm's averages are averaged over the devices before a
save, not at each step. The network is the case's own, in Haiku.
"""

import logging
import time
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import jax_utils
from flax.training import checkpoints, common_utils, train_state
from jax import lax

from peers import hand, stacked

LOG_EVERY, SAVE_EVERY = 50, 500


class TrainState(train_state.TrainState):
    batch_stats: Any


def train_step(state: TrainState, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        (losses, values), new = state.apply_fn(params, state.batch_stats, None, batch)
        return losses.mean(), (new, {name: value.mean() for name, value in values.items()})

    (loss, (batch_stats, metrics)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = lax.pmean(grads, "batch")
    metrics = lax.pmean({"loss": loss, **metrics}, "batch")
    metrics["grad_norm"] = optax.tree.norm(grads)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), metrics


def _averages(tree: Any) -> Any:
    floats = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: lax.pmean(x, "batch") if floats(x) else x, tree)


class Loop:
    """Trains a case, a chunk at a time."""

    def __init__(self, case: Any, state: Any = None, folder: Any = None):
        params, batch_stats, _ = hand.initial(case) if state is None else state
        network = hk.transform_with_state(case.loss)
        made = TrainState.create(
            apply_fn=network.apply, params=params, tx=case.optimizer, batch_stats=batch_stats
        )
        self._state = jax_utils.replicate(made)
        self._update = jax.pmap(train_step, axis_name="batch", donate_argnums=0)
        self._sync = jax.pmap(_averages, axis_name="batch")
        host = stacked.host_batches(case.arrays, case.batch_size)
        self._batches = jax_utils.prefetch_to_device(host, 2)
        self._folder = folder
        self._log = logging.getLogger("flax")
        self._log.addHandler(logging.StreamHandler())
        self._log.setLevel(logging.INFO)
        self._log.propagate = False
        self._metrics: list[Any] = []
        self._done = 0

    def run(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            self._state, metrics = self._update(self._state, next(self._batches))
            self._metrics.append(metrics)
            self._done += 1
            if self._done % LOG_EVERY == 0:
                fetched = common_utils.get_metrics(self._metrics)
                self._log.info("step %d: %s", self._done, jax.tree.map(lambda x: x.mean(), fetched))
                self._metrics = []
            if self._folder is not None and self._done % SAVE_EVERY == 0:
                checkpoints.save_checkpoint(self._folder, self.result_state(), self._done, keep=3)
        jax.block_until_ready(self._state)
        return time.perf_counter() - started

    def result_state(self) -> TrainState:
        """The state without its device axis, on the host."""
        self._state = self._state.replace(batch_stats=self._sync(self._state.batch_stats))
        return jax.device_get(jax.tree.map(lambda x: x[0], self._state))

    def result(self) -> Any:
        state = self.result_state()
        return state.params, state.batch_stats, state.opt_state
