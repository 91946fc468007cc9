"""A layer is made, and its output is not used."""

import haiku as hk
import optax

from haikutrain import config_file

sound = config_file.load(__file__.replace("layer_ignored", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def loss(self, batch, is_training):
        x = self.hidden(batch, is_training)
        hk.Linear(4, name="ignored")(x)
        logits = hk.Linear(2)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {}
