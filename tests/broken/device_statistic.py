"""Each device subtracts the mean of its own rows."""

from haikutrain import config_file

sound = config_file.load(__file__.replace("device_statistic", "sound"))


def get_config():
    return sound.config


class Run(sound.experiment_class):
    def loss(self, batch, is_training):
        centred = {**batch, "x": batch["x"] - batch["x"].mean(0)}
        return super().loss(centred if is_training else batch, is_training)
