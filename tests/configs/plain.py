"""A small experiment that is right; the tests of mistakes put their own class `Run` behind it."""

import haiku as hk
import jax
import numpy as np
import optax

import haikutrain
from haikutrain import ArrayDataset


def get_config():
    config = haikutrain.base_config()
    config.experiment = ":Run"
    config.num_steps = 4
    config.batch_size = 8
    config.log_every = 1
    config.checkpoint_every = 2
    config.width = 4
    config.rows = 20
    return config


def arrays(rows):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "label": (x[:, 0] > 0).astype(np.int32)}


class Run(haikutrain.Experiment):
    def loss(self, batch, is_training):
        x = hk.Linear(self.config.width)(batch["x"])
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
        logits = hk.Linear(2)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {"accuracy": logits.argmax(-1) == batch["label"]}

    def optimizer(self):
        return optax.adam(1e-2)

    def train_data(self):
        return ArrayDataset(arrays(self.config.rows), self.config.batch_size, self.config.seed)

    def eval_data(self):
        return ArrayDataset(arrays(10), 4)


Base = Run
