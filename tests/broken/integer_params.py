"""A param is an integer."""

import haiku as hk
import jax.numpy as jnp

from haikutrain import config_file

sound = config_file.load(__file__.replace("integer_params", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def loss(self, batch, is_training):
        scale = hk.get_parameter("scale", [], jnp.int32, init=jnp.ones)
        losses, metrics = super().loss(batch, is_training)
        return losses * scale, metrics
