"""Each device follows its own gradients."""

import optax

import haikutrain
from haikutrain import config_file

sound = config_file.load(__file__.replace("gradients_not_averaged", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def update(self, state, batch, rngs):
        grads, network_state, metrics = self.gradients(state, batch, rngs)
        changes, opt_state = self.optimizer().update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)
        network_state, metrics = haikutrain.pmean((network_state, metrics))
        state = state.replace(params=params, opt_state=opt_state, network_state=network_state)
        return state, metrics
