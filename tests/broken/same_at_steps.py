"""Each device has a key, which never advances."""

import haiku as hk
import jax

import haikutrain
from haikutrain import config_file

sound = config_file.load(__file__.replace("same_at_steps", "sound"))


def get_config():
    sound.config.dropout = 0.5
    return sound.config


class Run(sound.experiment_class):
    def update(self, state, batch, rngs):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(haikutrain.AXIS))
        return super().update(state, batch, hk.PRNGSequence(key))
