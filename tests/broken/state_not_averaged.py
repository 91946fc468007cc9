"""Each device keeps the moving averages of its own rows."""

import haikutrain
from haikutrain import config_file

sound = config_file.load(__file__.replace("state_not_averaged", "sound"))


def get_config():
    sound.config.local_norm = True
    return sound.config


class Run(sound.experiment_class):
    def update(self, state, batch, rngs):
        grads, network_state, metrics = self.gradients(state, batch, rngs)
        state, metrics = haikutrain.apply_gradients(
            state,
            grads,
            network_state=network_state,
            optimizer=self.optimizer(),
            metrics=metrics,
        )
        return state.replace(network_state=network_state), metrics
