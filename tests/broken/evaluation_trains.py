"""Evaluation runs the network in training mode."""

from haikutrain import config_file

sound = config_file.load(__file__.replace("evaluation_trains", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def loss(self, batch, is_training):
        return super().loss(batch, is_training=True)
