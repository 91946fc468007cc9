"""The network state is averaged whole: BatchNorm's integer counter becomes a float."""

from jax import lax

import haikutrain
from haikutrain import config_file

sound = config_file.load(__file__.replace("counter_averaged", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def update(self, state, batch, rngs):
        state, metrics = super().update(state, batch, rngs)
        network_state = lax.pmean(state.network_state, haikutrain.AXIS)
        return state.replace(network_state=network_state), metrics
