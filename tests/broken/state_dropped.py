"""The update returns the network state that it was given."""

import haikutrain
from haikutrain import config_file

sound = config_file.load(__file__.replace("state_dropped", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def update(self, state, batch, rngs):
        grads, _, metrics = self.gradients(state, batch, rngs)
        return haikutrain.apply_gradients(
            state,
            grads,
            network_state=state.network_state,
            optimizer=self.optimizer(),
            metrics=metrics,
        )
