"""A pmapped training loop as an expert would write it by hand, and nothing more.

No logging, no checkpoints, no checks: batches sliced by a permutation, each on the devices while
the step before it runs; a donated, replicated state without a device axis; the same metrics, the
gradients' norm among them, that nobody reads. One mean over the devices: of all float leaves packed
in one buffer, or of the trees as they are.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import haiku as hk
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "i"


def sharding(*spec: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.local_devices()), (AXIS,)), PartitionSpec(*spec))


def tree_pmean(tree: Any) -> Any:
    """The mean over the devices of the float leaves, as they are."""

    def mean(leaf: Any) -> Any:
        return lax.pmean(leaf, AXIS) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(mean, tree)


def packed_pmean(tree: Any) -> Any:
    """The mean over the devices of the float leaves, in one buffer."""
    if lax.axis_size(AXIS) == 1:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    flat, unravel = jax.flatten_util.ravel_pytree([leaves[i] for i in floats])
    for i, leaf in zip(floats, unravel(lax.pmean(flat, AXIS)), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def make_step(
    network: Any, optimizer: optax.GradientTransformation, mean: Callable[[Any], Any]
) -> Callable[..., Any]:
    """(state, batch) -> (state, metrics), for one device."""

    def step(state: Any, batch: Any) -> Any:
        params, network_state, opt_state = state

        def mean_loss(params: Any) -> Any:
            (losses, metrics), new = network.apply(params, network_state, None, batch)
            means = {name: value.mean() for name, value in metrics.items()}
            return losses.mean(), (new, {"loss": losses.mean(), **means})

        grads, (network_state, metrics) = jax.grad(mean_loss, has_aux=True)(params)
        grads, network_state, metrics = mean((grads, network_state, metrics))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics["grad_norm"] = optax.tree.norm(grads)
        return (optax.apply_updates(params, updates), network_state, opt_state), metrics

    return step


def initial(case: Any) -> Any:
    """Params, network state and optimizer state on the host."""
    network = hk.transform_with_state(case.loss)
    first = {name: array[:1] for name, array in case.arrays.items()}
    params, network_state = jax.jit(network.init)(jax.random.PRNGKey(0), first)
    state = params, network_state, jax.jit(case.optimizer.init)(params)
    return jax.tree.map(np.array, state)


def orders(examples: int, size: int) -> Iterator[np.ndarray]:
    """The rows of each batch: each epoch shuffled anew, nothing dropped."""
    epoch, order = 0, np.empty(0, int)
    while True:
        while len(order) < size:
            shuffled = np.random.default_rng([0, epoch]).permutation(examples)
            order, epoch = np.concatenate([order, shuffled]), epoch + 1
        yield order[:size]
        order = order[size:]


def batches(arrays: dict[str, np.ndarray], size: int) -> Iterator[Any]:
    """Batches on the devices, `[D, B / D, ...]`."""
    devices, place = jax.local_device_count(), sharding(AXIS)
    for index in orders(len(next(iter(arrays.values()))), size):
        batch = {
            name: array[index].reshape(devices, size // devices, *array.shape[1:])
            for name, array in arrays.items()
        }
        yield jax.device_put(batch, place)


class Loop:
    """Trains a case, a chunk at a time."""

    mean = staticmethod(packed_pmean)

    def __init__(self, case: Any, state: Any = None, folder: Any = None):
        self.state = jax.device_put(initial(case) if state is None else state, sharding())
        step = make_step(hk.transform_with_state(case.loss), case.optimizer, self.mean)
        self.update = jax.pmap(
            step, axis_name=AXIS, in_axes=(None, 0), out_axes=None, donate_argnums=0
        )
        self._batches = batches(case.arrays, case.batch_size)
        self._batch = next(self._batches)

    def run(self, steps: int) -> float:
        started = time.perf_counter()
        state, batch = self.state, self._batch
        for _ in range(steps):
            state, metrics = self.update(state, batch)
            batch = next(self._batches)
        metrics["loss"].block_until_ready()
        seconds = time.perf_counter() - started
        self.state, self._batch = state, batch
        return seconds

    def result(self) -> Any:
        return jax.tree.map(np.array, self.state)


class TreesLoop(Loop):
    """With `lax.pmean` of the trees."""

    mean = staticmethod(tree_pmean)
