"""A tiny experiment on grain; `config.form`: "map", "batched", "workers" or "iter", of one order.

The metric `ids` is a checksum of which examples stood where in the global batch.
"""

import os
import pathlib
import threading

import grain
import haiku as hk
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import haikutrain

EXAMPLES = 50


def get_config():
    config = haikutrain.base_config()
    config.experiment = ":Grained"
    config.num_steps = 20
    config.batch_size = 8
    config.log_every = 1
    config.checkpoint_every = 6
    config.form = "map"
    config.workers = 2
    config.data_seed = 3
    config.pids = ""  # A folder in which each process that makes examples leaves its number.
    config.hold_at = 0  # The step after which the process says so and waits, to be killed.
    return config


class Source:
    """A class and a module that no other process could import."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return {"id": np.int32(index), "x": np.float32([index / EXAMPLES, 1])}


class Noise(grain.transforms.RandomMap):
    def __init__(self, pids):
        self.pids = pids

    def random_map(self, element, rng):
        if self.pids:
            pathlib.Path(self.pids, str(os.getpid())).touch()
        return {**element, "x": element["x"] + rng.normal(size=2).astype(np.float32)}


class Grained(haikutrain.Experiment):
    def loss(self, batch, is_training):
        losses = optax.l2_loss(hk.Linear(1)(batch["x"])[:, 0], batch["id"] / EXAMPLES)
        if not is_training:
            return losses, {"id": batch["id"]}
        rows = batch["id"].shape[0]
        place = lax.axis_index(haikutrain.AXIS) * rows + jnp.arange(rows)
        return losses, {"ids": batch["id"] * (place + 1)}

    def optimizer(self):
        return optax.adam(0.01)

    def train_data(self):
        c = self.config
        dataset = grain.MapDataset.source(Source()).seed(c.data_seed).shuffle().repeat()
        dataset = dataset.random_map(Noise(c.pids))
        if c.form == "workers":
            return haikutrain.GrainDataset(dataset, c.batch_size, num_workers=c.workers)
        if c.form == "iter":
            workers = grain.MultiprocessingOptions(num_workers=c.workers)
            read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
            return dataset.batch(c.batch_size).to_iter_dataset(read).mp_prefetch(workers)
        return dataset.batch(c.batch_size) if c.form == "batched" else dataset

    def eval_data(self):
        return {"all": grain.MapDataset.source(Source())}

    def hooks(self):
        def hold(info):
            if info.step == self.config.hold_at:
                print("held", flush=True)
                threading.Event().wait()

        return [hold]
