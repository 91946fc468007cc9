"""ResNet-18 or -50 for 32x32 pictures: CIFAR-10, CIFAR-100, or handwritten digits made larger.

python -m haikutrain.main --config=experiments/cifar_resnet.py:digits

2 minutes on 2 CPU cores (111 s of CPU time); 99.7 % of the 360 held-out digits, with the averaged
and with the raw weights. For CIFAR, whose files it reads from config.data_dir, name no variant, or
cifar100; --config.depth=50 takes the larger network.

The recipe is that of T. DeVries and G. Taylor, https://arxiv.org/abs/1708.04552 (crop, flip, SGD
with Nesterov's momentum, batches of 128, rate 0.1, decay 5e-4, 200 epochs), who report 95.28 % for
CIFAR-10 and 77.54 % for CIFAR-100 without cutout; with warm-up, cosine, smoothed labels, and no
decay of biases and norms from T. He et al., https://arxiv.org/abs/1812.01187, in place of steps in
the rate; and with averaged weights. Verified here: the numbers of parameters, the files' format,
training on digits. Not verified: what CIFAR comes to, since it is not at hand.
"""

from typing import Any

import haiku as hk
import jax
import numpy as np
import optax

import haikutrain
from haikutrain import augment, readers

ARCHIVES = {
    "cifar10": "data_batch_1.bin to data_batch_5.bin and test_batch.bin, which are in "
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "cifar100": "train.bin and test.bin, which are in "
    "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
}
MEAN = np.array([125.3, 123.0, 113.9], np.float32)  # Of CIFAR-10.
STD = np.array([63.0, 62.1, 66.7], np.float32)


def get_config(variant="cifar10"):
    if variant not in (*ARCHIVES, "digits"):
        raise ValueError(f"there is no variant {variant!r}; use cifar10, cifar100 or digits")
    config = haikutrain.base_config()
    config.experiment = ":CifarResNet"
    config.data = variant
    config.data_dir = "data"  # Where the archive was unpacked.
    config.train_examples = 50_000
    config.classes = 100 if variant == "cifar100" else 10
    config.num_epochs = 200
    config.batch_size = 128
    config.depth = 18  # Or 34, 50, 101, ...
    config.width = 64  # Channels of the stem.
    config.cross_replica = False  # BatchNorm over the batch of all devices, not over each one's.
    config.crop_padding = 4
    config.flip = True
    config.label_smoothing = 0.1
    config.learning_rate = 0.1
    config.warmup_epochs = 5
    config.weight_decay = 5e-4
    config.ema_decay = 0.999
    config.eval_raw = True
    if variant == "digits":
        config.train_examples = 1437
        config.num_epochs = 15
        config.batch_size = 64
        config.width = 8
        config.flip = False  # Mirrored digits are no digits.
        config.warmup_epochs = 1
        config.ema_decay = 0.98
        config.log_every = 20
    # References: they follow when the fields that they are made of are overridden.
    examples, batch_size = config.get_ref("train_examples"), config.get_ref("batch_size")
    config.num_steps = config.get_ref("num_epochs") * examples // batch_size
    config.eval_every = config.checkpoint_every = 5 * examples // batch_size
    return config


class CifarResNet(haikutrain.Experiment):
    def loss(self, batch, is_training):
        c, x = self.config, batch["image"]
        if is_training:
            x = augment.random_crop(hk.next_rng_key(), x, c.crop_padding)
            x = augment.random_flip(hk.next_rng_key(), x) if c.flip else x
        logits = self.network((x - MEAN) / STD, is_training)
        targets = jax.nn.one_hot(batch["label"], c.classes)
        if is_training:
            targets = optax.smooth_labels(targets, c.label_smoothing)
        predicted = logits.argmax(-1)
        return optax.softmax_cross_entropy(logits, targets), {
            "accuracy": predicted == batch["label"],
            "label": haikutrain.Rows(batch["label"]),
            "predicted": haikutrain.Rows(predicted),
        }

    def network(self, x, is_training):
        """Haiku's ResNet with a stem that leaves 32x32 pixels as they are."""
        c = self.config
        parts: Any = hk.nets.ResNet.CONFIGS[c.depth]
        axis = haikutrain.AXIS if c.cross_replica else None
        norm: Any = {"decay_rate": 0.9, "cross_replica_axis": axis}
        x = hk.Conv2D(c.width, 3, with_bias=False, name="stem")(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, **norm, name="stem_norm")(x, is_training))
        for i, channels in enumerate(parts["channels_per_group"]):
            group = hk.nets.ResNet.BlockGroup(
                channels * c.width // 64,
                parts["blocks_per_group"][i],
                stride=1 if i == 0 else 2,
                bn_config=norm,
                resnet_v2=False,
                bottleneck=parts["bottleneck"],
                use_projection=parts["use_projection"][i],
            )
            x = group(x, is_training, test_local_stats=False)
        return hk.Linear(c.classes, name="logits")(x.mean((1, 2)))

    def optimizer(self):
        c = self.config
        warmup_steps = haikutrain.epochs(c.warmup_epochs, c.train_examples, c.batch_size)
        rate = haikutrain.warmup_cosine(c.learning_rate, c.num_steps, warmup_steps)
        return optax.chain(
            optax.add_decayed_weights(c.weight_decay, haikutrain.decay_mask()),
            optax.trace(0.9, nesterov=True),
            haikutrain.scale_by_learning_rate(rate),
        )

    def train_data(self):
        c = self.config
        return haikutrain.ArrayDataset(self.arrays("train"), c.batch_size, seed=c.seed)

    def eval_data(self):
        return {"test": haikutrain.ArrayDataset(self.arrays("test"), self.config.batch_size)}

    def arrays(self, split):
        """`image`: uint8 `[N, 32, 32, 3]`; `label`: int32 `[N]`."""
        c = self.config
        if c.data == "digits":
            image, label = haikutrain.digits(split).values()
            image = (255 * image).astype(np.uint8).repeat(4, axis=1).repeat(4, axis=2)
            return {"image": image.repeat(3, axis=3), "label": label}
        try:
            return readers.read_cifar(c.data_dir, split, c.classes)
        except haikutrain.UsageError as error:
            raise haikutrain.UsageError(
                f"config.data_dir={c.data_dir!r}: {error}; wanted are {ARCHIVES[c.data]}. To try "
                "it without them: --config=experiments/cifar_resnet.py:digits"
            ) from error

    def report(self, state, split, rows):
        """The confusion matrix: for the examples of each class (a row) what was predicted."""
        matrix = np.zeros((self.config.classes, self.config.classes))
        np.add.at(matrix, (rows["label"], rows["predicted"]), 1)
        matrix /= np.maximum(matrix.sum(axis=1, keepdims=True), 1)
        picture = matrix.repeat(8, axis=0).repeat(8, axis=1)
        return {"worst_class_accuracy": matrix.diagonal().min(), "confusion": picture}
