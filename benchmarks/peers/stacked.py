"""The loop in the shape that public experiments have: every array with a leading device axis.

A second pmapped call advances step and keys; the first device's part is taken of every metric at
each step; every 50 steps a line is logged, every 500 the whole state is fetched and pickled while
the loop waits.
"""

import logging
import pathlib
import pickle
import time
from collections.abc import Iterator
from typing import Any

import haiku as hk
import jax
import numpy as np

from peers import hand

LOG_EVERY, SAVE_EVERY = 50, 500


def replicate(tree: Any) -> Any:
    """A copy for each device, `[D, ...]`."""
    count, place = jax.local_device_count(), hand.sharding(hand.AXIS)
    return jax.tree.map(lambda x: jax.device_put(np.stack([np.asarray(x)] * count), place), tree)


def first(tree: Any) -> Any:
    """The first device's part."""
    return jax.tree.map(lambda x: x[0], tree)


def host_batches(arrays: dict[str, np.ndarray], size: int) -> Iterator[Any]:
    """Batches on the host, `[D, B / D, ...]`."""
    count = jax.local_device_count()
    for index in hand.orders(len(next(iter(arrays.values()))), size):
        yield {
            name: array[index].reshape(count, size // count, *array.shape[1:])
            for name, array in arrays.items()
        }


class Loop:
    """Trains a case, a chunk at a time."""

    def __init__(self, case: Any, state: Any = None, folder: Any = None):
        self._state = replicate(hand.initial(case) if state is None else state)
        self._step = replicate(np.int32(0))
        self._rng = replicate(jax.random.split(jax.random.PRNGKey(0), 1)[0])
        step = hand.make_step(hk.transform_with_state(case.loss), case.optimizer, hand.tree_pmean)
        self._update = jax.pmap(step, axis_name=hand.AXIS, donate_argnums=0)
        self._advance = jax.pmap(
            lambda step, rng: (step + 1, jax.random.split(rng)[0]), axis_name=hand.AXIS
        )
        self._batches = host_batches(case.arrays, case.batch_size)
        self._folder = pathlib.Path(folder) if folder is not None else None
        self._log = logging.getLogger("stacked")
        self._log.addHandler(logging.StreamHandler())
        self._log.setLevel(logging.INFO)
        self._log.propagate = False
        self._done = 0

    def run(self, steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            batch = jax.device_put(next(self._batches), hand.sharding(hand.AXIS))
            self._state, metrics = self._update(self._state, batch)
            self._step, self._rng = self._advance(self._step, self._rng)
            metrics = first(metrics)
            self._done += 1
            if self._done % LOG_EVERY == 0:
                values = {name: float(value) for name, value in metrics.items()}
                self._log.info("step %d: %s", int(self._step[0]), values)
            if self._folder is not None and self._done % SAVE_EVERY == 0:
                self._save(self._folder)
        jax.block_until_ready(self._state)
        return time.perf_counter() - started

    def _save(self, folder: pathlib.Path) -> None:
        whole = jax.device_get(first((self._step, self._rng, self._state)))
        new = folder / "checkpoint.tmp"
        with new.open("wb") as file:
            pickle.dump(whole, file)
        new.replace(folder / "checkpoint.pkl")

    def result(self) -> Any:
        return jax.device_get(first(self._state))
