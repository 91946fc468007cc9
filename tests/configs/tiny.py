"""A tiny experiment with every kind of state, for tests of the whole; variants: `get_config`.

`config.net`: "mlp" or "conv". `config.data`: "arrays", "iterator" or "grain".
The metric `ids` is a checksum of which examples stood where in the global batch.
"""

import os
import threading
import time

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import haikutrain

EXAMPLES = 50


def get_config(variant=""):
    config = haikutrain.base_config()
    config.experiment = ":Tiny"
    config.num_steps = 24
    config.batch_size = 16
    config.log_every = 4
    config.eval_every = 8
    config.checkpoint_every = 6
    config.net = "mlp"
    config.data = "arrays"
    config.dropout = 0.5
    config.noise = 0.1  # Augmentation on the device.
    config.cross_replica = False
    config.learning_rate = 0.05
    config.hold_at = 0  # The step after which the process waits, to be killed.
    # Where it says that it is there, in the file, and waits a second: "trace", "hook" or "report".
    config.pause = ""
    config.pause_file = ""
    for word in filter(None, variant.split("-")):
        if word in ("conv", "mlp"):
            config.net = word
        elif word in ("arrays", "iterator", "grain"):
            config.data = word
        elif word == "exact":  # Nothing in it depends on how a batch is split over devices.
            config.cross_replica, config.dropout, config.noise = True, 0.0, 0.0
        else:
            raise ValueError(f"no variant {word!r}")
    return config


def arrays(seed=0, examples=EXAMPLES):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, examples)
    image = rng.normal(size=(examples, 4, 4, 1)) + label[:, None, None, None]
    return {"image": image.astype(np.float32), "label": label, "id": np.arange(examples)}


class Counting:
    """An iterable whose iterator says its position."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return CountingIterator(self.dataset)


class CountingIterator:
    def __init__(self, dataset):
        self.dataset, self.next_step = dataset, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.next_step += 1
        return self.dataset.batch(self.next_step - 1)

    def get_state(self):
        return {"next_step": self.next_step}

    def set_state(self, state):
        self.next_step = state["next_step"]


class Tiny(haikutrain.Experiment):
    def pause(self, where):
        if where == self.config.pause and not os.path.exists(self.config.pause_file):
            with open(self.config.pause_file, "w") as file:
                file.write(where)
            time.sleep(1)

    def loss(self, batch, is_training):
        self.pause("trace")
        c, x = self.config, batch["image"]
        if is_training and c.noise:
            x = x + c.noise * jax.random.normal(hk.next_rng_key(), x.shape)
        axis = haikutrain.AXIS if c.cross_replica else None
        if c.net == "conv":
            x = hk.Conv2D(4, 3, with_bias=False)(x)
        else:
            x = hk.Linear(8, with_bias=False)(hk.Flatten()(x))
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis)(x, is_training))
        if is_training and c.dropout:
            x = hk.dropout(hk.next_rng_key(), c.dropout, x)
        logits = hk.Linear(3)(hk.Flatten()(x))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        metrics = {"accuracy": logits.argmax(-1) == batch["label"]}
        if is_training:
            rows = batch["id"].shape[0]
            place = lax.axis_index(haikutrain.AXIS) * rows + jnp.arange(rows)
            metrics["ids"] = batch["id"] * (place + 1)
        return losses, metrics

    def optimizer(self):
        c = self.config
        rate = haikutrain.warmup_cosine(c.learning_rate, c.num_steps, warmup_steps=2)
        return optax.chain(optax.trace(0.9), haikutrain.scale_by_learning_rate(rate))

    def train_data(self):
        c = self.config
        if c.data == "grain":
            import grain

            source = [jax.tree.map(lambda a, i=i: a[i], arrays()) for i in range(EXAMPLES)]
            dataset = grain.MapDataset.source(source).seed(c.seed).shuffle().repeat()
            return dataset.batch(c.batch_size).to_iter_dataset()
        dataset = haikutrain.ArrayDataset(arrays(), c.batch_size, seed=c.seed)
        return Counting(dataset) if c.data == "iterator" else dataset

    def eval_data(self):
        test = haikutrain.ArrayDataset(arrays(seed=1, examples=10), 4)
        return {"test": test, "few": haikutrain.ArrayDataset(arrays(seed=2, examples=3), 16)}

    def hooks(self):
        def hold(info):
            if info.step == self.config.hold_at:
                threading.Event().wait()
            if info.step > 8:
                self.pause("hook")

        return [hold]

    def report(self, state, split, rows):
        self.pause("report")
        return {}
