"""A gradient is not finite at the third step."""

import haiku as hk
import jax.numpy as jnp

import haikutrain
from haikutrain import config_file

sound = config_file.load(__file__.replace("not_finite", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def loss(self, batch, is_training):
        losses, metrics = super().loss(batch, is_training)
        scale = hk.get_parameter("scale", [], init=jnp.ones)
        return losses / (scale * (haikutrain.step() != 2)), metrics
