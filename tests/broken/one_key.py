"""Dropout has a key that is a constant."""

import haiku as hk
import jax
import optax

from haikutrain import config_file

sound = config_file.load(__file__.replace("one_key", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def loss(self, batch, is_training):
        x = self.hidden(batch, is_training)
        if is_training:
            x = hk.dropout(jax.random.key(0), 0.5, x)
        logits = hk.Linear(2)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {}
