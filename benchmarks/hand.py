"""The other side: a pmapped training loop as an expert would write it by hand, and nothing more.

No logging, no checkpoints, no checks: batches sliced by a permutation, each on the devices while
the step before it runs; one packed mean over the devices; a donated, replicated state without a
device axis; the same metrics, the gradients' norm among them, that nobody reads.
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


def sharding(*spec: str) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.local_devices()), (AXIS,)), PartitionSpec(*spec))


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


def make_update(network: Any, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """(state, batch) -> (state, metrics), pmapped."""

    def update(state: Any, batch: Any) -> Any:
        params, network_state, opt_state = state

        def mean_loss(params: Any) -> Any:
            (losses, metrics), new = network.apply(params, network_state, None, batch)
            means = {name: value.mean() for name, value in metrics.items()}
            return losses.mean(), (new, {"loss": losses.mean(), **means})

        grads, (network_state, metrics) = jax.grad(mean_loss, has_aux=True)(params)
        grads, network_state, metrics = packed_pmean((grads, network_state, metrics))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics["grad_norm"] = optax.tree.norm(grads)
        return (optax.apply_updates(params, updates), network_state, opt_state), metrics

    return jax.pmap(update, axis_name=AXIS, in_axes=(None, 0), out_axes=None, donate_argnums=0)


def batches(arrays: dict[str, np.ndarray], size: int, seed: int = 0) -> Iterator[Any]:
    """Batches on the devices, `[D, B / D, ...]`, shuffled anew each epoch."""
    rng = np.random.default_rng(seed)
    devices, place = jax.local_device_count(), sharding(AXIS)
    examples = len(next(iter(arrays.values())))
    while True:
        order = rng.permutation(examples)
        for start in range(0, examples - size + 1, size):
            index = order[start : start + size]
            batch = {
                name: array[index].reshape(devices, size // devices, *array.shape[1:])
                for name, array in arrays.items()
            }
            yield jax.device_put(batch, place)


class Loop:
    """Trains `loss`, a Haiku function of a batch, a chunk at a time."""

    def __init__(
        self,
        loss: Callable[[Any], Any],
        optimizer: optax.GradientTransformation,
        arrays: dict[str, np.ndarray],
        batch_size: int,
    ):
        network = hk.transform_with_state(loss)
        first = {name: array[:1] for name, array in arrays.items()}
        params, network_state = jax.jit(network.init)(jax.random.PRNGKey(0), first)
        state = params, network_state, jax.jit(optimizer.init)(params)
        self.state = jax.device_put(state, sharding())
        self.update = make_update(network, optimizer)
        self._batches = batches(arrays, batch_size)
        self._batch = next(self._batches)

    def run(self, steps: int) -> float:
        """Seconds of so many steps, until the devices have done them."""
        started = time.perf_counter()
        state, batch = self.state, self._batch
        for _ in range(steps):
            state, metrics = self.update(state, batch)
            batch = next(self._batches)
        metrics["loss"].block_until_ready()
        seconds = time.perf_counter() - started
        self.state, self._batch = state, batch
        return seconds
