"""A Python counter on self sets the weight of the loss."""

from haikutrain import config_file

sound = config_file.load(__file__.replace("counter_on_self", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    calls = 0

    def loss(self, batch, is_training):
        losses, metrics = super().loss(batch, is_training)
        self.calls += is_training
        return losses / (1 + self.calls), metrics
