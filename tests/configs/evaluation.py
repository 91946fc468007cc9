"""An experiment whose evaluation NumPy can repeat: the weight is 0.5 and never learns."""

import haiku as hk
import jax.numpy as jnp
import numpy as np
import optax

import haikutrain


def get_config():
    config = haikutrain.base_config()
    config.experiment = ":Fixed"
    config.num_steps = 1
    config.batch_size = 12  # 1, 2, 3 and 4 devices divide it.
    return config


def arrays(examples):
    x = np.random.default_rng(examples).normal(size=(examples, 3))
    return {"x": x.astype(np.float32)}


def expected(examples):
    """The metrics of the weight 0.5, by NumPy in float64."""
    x = arrays(examples)["x"].astype(np.float64)
    return {
        "loss": (0.5 * (x**2).sum(1)).mean(),
        "positive": (x[:, 0] > 0).mean(),
        "cosine": (x[:, 0] / np.sqrt((x**2).sum(1))).mean(),
    }


class Fixed(haikutrain.Experiment):
    def loss(self, batch, is_training):
        x = batch["x"]
        weight = hk.get_parameter("weight", [], init=hk.initializers.Constant(0.5))
        norm = jnp.sqrt((x**2).sum(1))
        # Padding of zeros would make NaN of this one.
        return weight * norm**2, {"positive": x[:, 0] > 0, "cosine": x[:, 0] / norm}

    def optimizer(self):
        return optax.set_to_zero()

    def train_data(self):
        return haikutrain.ArrayDataset(arrays(30), self.config.batch_size, seed=0)

    def eval_data(self):
        return {
            "ragged": haikutrain.ArrayDataset(arrays(10), 4),
            "full": haikutrain.ArrayDataset(arrays(8), 4),
            "small": haikutrain.ArrayDataset(arrays(3), 16),
            "single": haikutrain.ArrayDataset(arrays(1), 4),
            "listed": [{"x": part} for part in np.split(arrays(11)["x"], [5, 10])],
        }


SPLITS = {"ragged": 10, "full": 8, "small": 3, "single": 1, "listed": 11}
