"""The rows of a part depend on its size: the global batch is not one."""

import numpy as np

from haikutrain import config_file

sound = config_file.load(__file__.replace("rows_by_part", "sound"))


def get_config():
    return sound.config


class Rows:
    def __init__(self, dataset):
        self.dataset = dataset

    def batch(self, step, rows=slice(None)):
        batch = self.dataset.batch(step, rows)
        order = np.random.default_rng(step).permutation(len(batch["id"]))
        return {name: array[order] for name, array in batch.items()}


class Run(sound.experiment_class):
    def train_data(self):
        return Rows(super().train_data())
