"""The network begins each step without the state."""

import haikutrain
from haikutrain import config_file

sound = config_file.load(__file__.replace("state_afresh", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def update(self, state, batch, rngs):
        grads, network_state, metrics = self.gradients(state.replace(network_state={}), batch, rngs)
        return haikutrain.apply_gradients(
            state,
            grads,
            network_state=network_state,
            optimizer=self.optimizer(),
            metrics=metrics,
        )
