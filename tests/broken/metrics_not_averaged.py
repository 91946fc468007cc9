"""The loss that is reported is the first device's."""

import haikutrain
from haikutrain import config_file

sound = config_file.load(__file__.replace("metrics_not_averaged", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def update(self, state, batch, rngs):
        grads, network_state, metrics = self.gradients(state, batch, rngs)
        state, _ = haikutrain.apply_gradients(
            state, grads, network_state=network_state, optimizer=self.optimizer()
        )
        return state, metrics
