"""The learning rate is 0."""

import optax

from haikutrain import config_file

sound = config_file.load(__file__.replace("rate_zero", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def optimizer(self):
        return optax.adam(0.0)
