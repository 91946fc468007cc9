"""The order of the data depends on the number of devices."""

import jax

import haikutrain
from haikutrain import config_file

sound = config_file.load(__file__.replace("order_by_devices", "sound"))
ARRAYS = sound.experiment_class.arrays()


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def train_data(self):
        return haikutrain.ArrayDataset(ARRAYS, self.config.batch_size, seed=jax.device_count())
