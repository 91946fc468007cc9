"""K steps compiled into one `lax.scan` by hand: what small networks can reach."""

import time
from collections.abc import Iterator
from typing import Any

import haiku as hk
import jax
import numpy as np
from jax import lax

from peers import hand

STEPS = 32
"""K."""


def batches(arrays: dict[str, np.ndarray], size: int) -> Iterator[Any]:
    """K batches at once on the devices, `[K, D, B / D, ...]`: one gather and one transfer."""
    devices, place = jax.local_device_count(), hand.sharding(None, hand.AXIS)
    for index in hand.orders(len(next(iter(arrays.values()))), STEPS * size):
        stacked = {
            name: array[index].reshape(STEPS, devices, size // devices, *array.shape[1:])
            for name, array in arrays.items()
        }
        yield jax.device_put(stacked, place)


class Loop:
    """Trains a case, some calls of K steps at a time."""

    def __init__(self, case: Any, state: Any = None, folder: Any = None):
        self.state = jax.device_put(hand.initial(case) if state is None else state, hand.sharding())
        network = hk.transform_with_state(case.loss)
        step = hand.make_step(network, case.optimizer, hand.packed_pmean)
        self._update = jax.pmap(
            lambda state, stacked: lax.scan(step, state, stacked),
            axis_name=hand.AXIS,
            in_axes=(None, 1),
            out_axes=None,
            donate_argnums=0,
        )
        self._batches = batches(case.arrays, case.batch_size)
        self._batch = next(self._batches)

    def run(self, steps: int) -> float:
        assert steps % STEPS == 0, (steps, STEPS)
        started = time.perf_counter()
        for _ in range(steps // STEPS):
            self.state, metrics = self._update(self.state, self._batch)
            self._batch = next(self._batches)
        metrics["loss"].block_until_ready()
        return time.perf_counter() - started

    def result(self) -> Any:
        return jax.tree.map(np.array, self.state)
