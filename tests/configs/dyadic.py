"""An experiment in which float32 never rounds: every number is a small multiple of a power of two.

Whatever the devices, three steps give the same bits: a digest can be compared across them.
"""

import haiku as hk
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import haikutrain


def get_config():
    config = haikutrain.base_config()
    config.experiment = ":Dyadic"
    config.num_steps = 3
    config.batch_size = 16
    config.log_every = 1
    config.checkpoint_every = 1
    return config


class Dyadic(haikutrain.Experiment):
    def loss(self, batch, is_training):
        w = hk.get_parameter("w", [4], init=jnp.zeros)
        mean = lax.pmean(batch["x"].mean(axis=0), haikutrain.AXIS)
        seen = hk.get_state("seen", [4], init=jnp.zeros)
        hk.set_state("seen", 0.5 * seen + 0.5 * mean)
        hk.set_state("count", hk.get_state("count", [], jnp.int32, init=jnp.zeros) + 1)
        return jnp.square(batch["x"] @ w - batch["y"]), {}

    def optimizer(self):
        return optax.sgd(1 / 16, momentum=0.5)

    def train_data(self):
        rng = np.random.default_rng(0)
        x = rng.integers(-1, 2, (40, 4)).astype(np.float32)
        y = rng.integers(-2, 3, 40).astype(np.float32)
        return haikutrain.ArrayDataset({"x": x, "y": y}, self.config.batch_size, seed=0)
