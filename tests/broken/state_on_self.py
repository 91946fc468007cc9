"""A moving average lies on self."""

from typing import Any

import jax

from haikutrain import config_file

sound = config_file.load(__file__.replace("state_on_self", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    average: Any = 0.0

    def loss(self, batch, is_training):
        losses, metrics = super().loss(batch, is_training)
        if not is_training:
            return losses, metrics
        baseline = self.average
        self.average = 0.9 * self.average + 0.1 * jax.lax.stop_gradient(losses.mean())
        return losses * (1 + baseline), metrics
