"""The first device's keys are given to all."""

import haiku as hk
from jax import lax

import haikutrain
from haikutrain import config_file

sound = config_file.load(__file__.replace("key_broadcast", "sound"))


def get_config():
    sound.config.dropout = 0.5
    return sound.config


class Run(sound.experiment_class):
    def update(self, state, batch, rngs):
        key = lax.all_gather(next(rngs), haikutrain.AXIS)[0]
        return super().update(state, batch, hk.PRNGSequence(key))
