"""What the benchmarks train: the same network and optimizer for the framework and by hand."""

import dataclasses
import importlib.util
import pathlib
from typing import Any

import haiku as hk
import jax
import numpy as np
import optax
from pairs import FAR

import haikutrain

ROOT = pathlib.Path(__file__).parent.parent


@dataclasses.dataclass
class Case:
    """One thing to train."""

    experiment: haikutrain.Experiment
    optimizer: optax.GradientTransformation
    """What its optimizer is in plain optax."""
    arrays: dict[str, np.ndarray]
    """What its training data is made of."""

    @property
    def batch_size(self) -> int:
        return self.experiment.config.batch_size

    def loss(self, batch: Any) -> Any:
        return self.experiment.loss(batch, True)


class Mlp(haikutrain.Experiment):
    """Hidden layers with BatchNorm on the digits; with one it is the README's example."""

    def loss(self, batch: Any, is_training: bool) -> Any:
        x = hk.Flatten()(batch["image"])
        for _ in range(self.config.layers):
            x = hk.Linear(self.config.width, with_bias=False)(x)
            x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
        logits = hk.Linear(10)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {"accuracy": logits.argmax(-1) == batch["label"]}

    def optimizer(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)

    def train_data(self) -> Any:
        c, arrays = self.config, haikutrain.digits("train")
        return haikutrain.ArrayDataset(arrays, c.batch_size, seed=0, on_device=c.on_device)


def mlp(width: int = 64, layers: int = 2, *, on_device: bool = False) -> Case:
    """A tiny MLP, or a wide one; its data may lie on the devices."""
    config = endless(haikutrain.base_config())
    config.batch_size, config.width, config.layers = 64, width, layers
    config.on_device = on_device
    return Case(Mlp(config), optax.adam(1e-3), haikutrain.digits("train"))


def _load(name: str) -> Any:
    path = ROOT / "experiments" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def resnet() -> Case:
    """The ResNet of `experiments/digits_resnet.py`, without its evaluations."""
    module = _load("digits_resnet")
    config = endless(module.get_config())
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, config.num_steps
    )
    experiment = module.DigitsResNet(config)
    experiment.eval_data = dict
    return Case(experiment, optax.adam(rate), haikutrain.digits("train"))


def resnet18(batch_size: int = 16) -> Case:
    """The ResNet-18 of `experiments/cifar_resnet.py` on noise of CIFAR's size, not augmented."""
    module = _load("cifar_resnet")
    config = endless(module.get_config())
    config.batch_size, config.ema_decay, config.eval_raw = batch_size, None, False
    rng = np.random.default_rng(0)
    arrays = {
        "image": rng.integers(0, 256, (2000, 32, 32, 3), np.uint8),
        "label": rng.integers(0, 10, 2000).astype(np.int32),
    }
    optimizer = optax.sgd(1e-3, momentum=0.9)

    class ResNet18(module.CifarResNet):
        def loss(self, batch: Any, is_training: bool) -> Any:
            logits = self.network(batch["image"] / 127.5 - 1, is_training)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses, {"accuracy": logits.argmax(-1) == batch["label"]}

        def optimizer(self) -> optax.GradientTransformation:
            return optimizer

        def train_data(self) -> Any:
            return haikutrain.ArrayDataset(arrays, batch_size, seed=0)

        eval_data = dict

    return Case(ResNet18(config), optimizer, arrays)


def endless(config: Any) -> Any:
    """A config that only trains and logs, every 50 steps."""
    config.num_steps, config.checkpoint_every, config.log_every = FAR, FAR, 50
    config.eval_every, config.best_metric = None, None
    return config
