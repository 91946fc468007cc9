"""An experiment whose processes have data of their own: iterators, and uneven evaluation data."""

import pathlib
import threading
import time

import haiku as hk
import jax
import numpy as np
import optax

import haikutrain


def get_config():
    config = haikutrain.base_config()
    config.experiment = ":Sharded"
    config.num_steps = 30
    config.batch_size = 8
    config.log_every = 1
    config.checkpoint_every = 5
    config.eval_every = 10
    config.pause = 0.0  # Seconds that each step takes longer.
    config.raises = -1  # The process that raises an exception, and the one whose data end early.
    config.ends = -1
    config.stuck = -1  # The process whose hook never returns.
    config.steps = ""  # A folder in which each process leaves the step at which it is.
    return config


def rows(process, batch):
    """The training rows of a batch: `[4, 3]`, other ones for each process and batch."""
    rng = np.random.default_rng([process, batch])
    return rng.normal(size=(4, 3)).astype(np.float32)


def held_out(split, process):
    """The evaluation batches of a process: of unequal number and size."""
    sizes = {"uneven": ([3, 3, 2], [4]), "one": ([], [2, 1])}[split][process]
    rng = np.random.default_rng([process, len(split)])
    return [{"x": rng.normal(size=(size, 3)).astype(np.float32)} for size in sizes]


class Own:
    """This process's rows; process i moves on by i + 1 numbers a batch."""

    def __init__(self, process, ends):
        self.process, self.ends, self.number = process, ends, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.process == self.ends and self.number >= 12 * (self.process + 1):
            raise StopIteration
        self.number += self.process + 1
        return {"x": rows(self.process, self.number)}

    def get_state(self):
        return {"process": self.process, "number": self.number}

    def set_state(self, state):
        assert state["process"] == self.process
        self.number = state["number"]


class Sharded(haikutrain.Experiment):
    def loss(self, batch, is_training):
        y = hk.Linear(1)(batch["x"])[:, 0]
        weight = hk.get_parameter("weight", [], init=hk.initializers.Constant(0.5))
        first = batch["x"][:, 0]
        return optax.l2_loss(weight * y - first) + 0.0 * weight, {
            "first": first,
            "kept": haikutrain.Rows(first),
        }

    def optimizer(self):
        return optax.adam(0.01)

    def train_data(self):
        return Own(jax.process_index(), self.config.ends)

    def eval_data(self):
        return {split: held_out(split, jax.process_index()) for split in ("uneven", "one")}

    def hooks(self):
        process = jax.process_index()

        def watch(info):
            if self.config.steps:
                pathlib.Path(self.config.steps, str(process)).write_text(str(info.step))
            time.sleep(self.config.pause)
            if process == self.config.stuck and info.step == 7:
                threading.Event().wait()
            if process == self.config.raises and info.step == 7:
                raise ArithmeticError("a hook of this process alone")

        return [watch]
