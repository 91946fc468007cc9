"""A small experiment in which every promise holds; the other files here break one each."""

import haiku as hk
import jax
import numpy as np
import optax

import haikutrain


def get_config():
    config = haikutrain.base_config()
    config.experiment = ":Run"
    config.num_steps = 12
    config.batch_size = 8
    config.checkpoint_every = 4
    config.dropout = 0.0
    config.local_norm = False
    return config


def arrays(rows=20):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "label": (x[:, 0] > 0).astype(np.int32), "id": np.arange(rows)}


class Run(haikutrain.Experiment):
    arrays = staticmethod(arrays)

    def hidden(self, batch, is_training):
        x = hk.Linear(4, with_bias=False)(batch["x"])
        axis = None if self.config.local_norm else haikutrain.AXIS
        return jax.nn.relu(hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis)(x, is_training))

    def loss(self, batch, is_training):
        x = self.hidden(batch, is_training)
        if is_training and self.config.dropout:
            x = hk.dropout(hk.next_rng_key(), self.config.dropout, x)
        logits = hk.Linear(2)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {"accuracy": logits.argmax(-1) == batch["label"]}

    def optimizer(self):
        return optax.adam(1e-2)

    def train_data(self):
        return haikutrain.ArrayDataset(arrays(), self.config.batch_size, seed=0)

    def eval_data(self):
        return haikutrain.ArrayDataset(arrays(10), 4)
