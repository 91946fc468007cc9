"""A weight in the loss is drawn by NumPy."""

import numpy as np

from haikutrain import config_file

sound = config_file.load(__file__.replace("host_random", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def loss(self, batch, is_training):
        losses, metrics = super().loss(batch, is_training)
        return losses * np.random.uniform(), metrics
