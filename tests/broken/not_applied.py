"""The optimizer's changes are computed and dropped."""

import haikutrain
from haikutrain import config_file

sound = config_file.load(__file__.replace("not_applied", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def update(self, state, batch, rngs):
        grads, network_state, metrics = self.gradients(state, batch, rngs)
        new, metrics = haikutrain.apply_gradients(
            state,
            grads,
            network_state=network_state,
            optimizer=self.optimizer(),
            metrics=metrics,
        )
        return state.replace(network_state=new.network_state, opt_state=new.opt_state), metrics
