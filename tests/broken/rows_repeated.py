"""Rows are drawn with replacement."""

import numpy as np

from haikutrain import config_file

sound = config_file.load(__file__.replace("rows_repeated", "sound"))
ARRAYS = sound.experiment_class.arrays()


def get_config():
    return sound.config


class Rows:
    num_examples = 20

    def batch(self, step, rows=slice(None)):
        chosen = np.random.default_rng(step).integers(20, size=8)[rows]
        return {name: array[chosen] for name, array in ARRAYS.items()}


class Run(sound.experiment_class):
    def train_data(self):
        return Rows()
