"""All devices draw with the state's own key."""

import haiku as hk

from haikutrain import config_file

sound = config_file.load(__file__.replace("same_on_devices", "sound"))


def get_config():
    sound.config.dropout = 0.5
    return sound.config


class Run(sound.experiment_class):
    def update(self, state, batch, rngs):
        return super().update(state, batch, hk.PRNGSequence(state.rng))
