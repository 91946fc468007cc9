"""The first step of the README's network, by hand, with what such a script imports."""

import os
import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401
import tensorboardX  # noqa: F401
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DIGITS = pathlib.Path(__file__).parents[2] / "haikutrain" / "digits.npz"
AXIS = "i"


def forward(batch):
    x = hk.Linear(64, with_bias=False)(hk.Flatten()(batch["image"]))
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, True))
    logits = hk.Linear(10)(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), (logits.argmax(-1) == batch["label"]).mean()


network = hk.transform_with_state(forward)
optimizer = optax.adam(1e-3)


def update(params, network_state, opt_state, batch):
    def loss(params):
        (loss, accuracy), new = network.apply(params, network_state, None, batch)
        return loss, (new, {"loss": loss, "accuracy": accuracy})

    grads, (network_state, metrics) = jax.grad(loss, has_aux=True)(params)
    grads, metrics = lax.pmean((grads, metrics), AXIS)
    network_state = jax.tree.map(
        lambda x: lax.pmean(x, AXIS) if jnp.issubdtype(x.dtype, jnp.floating) else x, network_state
    )
    changes, opt_state = optimizer.update(grads, opt_state, params)
    metrics["grad_norm"] = optax.tree.norm(grads)
    return optax.apply_updates(params, changes), network_state, opt_state, metrics


def main():
    arrays = np.load(DIGITS)
    images = arrays["train_images"][..., None].astype(np.float32) / 16
    labels = arrays["train_labels"].astype(np.int32)
    mesh = Mesh(np.array(jax.local_devices()), (AXIS,))
    replicated, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (AXIS,)))
    order = np.random.default_rng(0).permutation(len(labels))[:64]
    count = jax.local_device_count()
    batch = {"image": images[order], "label": labels[order]}
    first = {name: array[:1] for name, array in batch.items()}
    params, network_state = jax.jit(network.init)(jax.random.PRNGKey(0), first)
    opt_state = jax.jit(optimizer.init)(params)
    state = jax.device_put((params, network_state, opt_state), replicated)
    batch = {n: a.reshape(count, 64 // count, *a.shape[1:]) for n, a in batch.items()}
    batch = jax.device_put(batch, split)
    step = jax.pmap(
        update,
        axis_name=AXIS,
        in_axes=(None, None, None, 0),
        out_axes=None,
        donate_argnums=(0, 1, 2),
    )
    *_, metrics = step(*state, batch)
    metrics["loss"].block_until_ready()
    os._exit(0)


if __name__ == "__main__":
    main()
