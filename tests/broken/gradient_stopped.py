"""A layer lies behind a stop_gradient."""

import haiku as hk
import jax
import optax

from haikutrain import config_file

sound = config_file.load(__file__.replace("gradient_stopped", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def loss(self, batch, is_training):
        x = self.hidden(batch, is_training)
        x = jax.lax.stop_gradient(hk.Linear(4, name="behind")(x)) + x
        logits = hk.Linear(2)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {}
