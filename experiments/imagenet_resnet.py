"""ResNet-50 on ImageNet, from a folder of pictures for each class or from array_record files.

python -m haikutrain.main --config=experiments/imagenet_resnet.py --config.data_dir=imagenet

Not run here: ImageNet is not at hand. The test trains a small network on 96 pictures that it draws,
in seconds. For another data set set config.classes, config.train_examples and config.batch_size.

The recipe is that of P. Goyal et al., https://arxiv.org/abs/1706.02677, who report 76.3 %: batches
of 8192 on 256 devices, BatchNorm on each one's 32; the rate 0.1 for each 256 examples, reached in 5
epochs from 0.1, a tenth after 30, 60 and 80 of 90 epochs; Nesterov's momentum. With :lars it is
that of Y. You et al., https://arxiv.org/abs/1708.03888, with the rate, the parabola and the
smoothed labels that MLPerf's public reference code has for 8192. Neither decays or rescales biases
and norms. Verified here: rates and updates by hand, the number of parameters, evaluation by hand on
every picture. Not verified: the accuracy. The convolutions begin as Haiku's do, not as He's.
"""

import functools
import io
import math
import pathlib
from typing import Any

import grain
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image

import haikutrain
from haikutrain import readers

WANTED = (
    "train/CLASS/*.JPEG and val/CLASS/*.JPEG, or train*.array_record and val*.array_record; "
    "ImageNet (ILSVRC2012) is at https://image-net.org/download"
)
MEAN = np.array([123.675, 116.28, 103.53], np.float32)
STD = np.array([58.395, 57.12, 57.375], np.float32)


def get_config(variant="sgd"):
    if variant not in ("sgd", "lars"):
        raise ValueError(f"there is no variant {variant!r}; use sgd or lars")
    config = haikutrain.base_config()
    config.experiment = ":ImageNetResNet"
    config.data_dir = "data/imagenet"
    config.classes = 1000
    config.train_examples = 1_281_167
    config.workers = 16  # Processes that decode and crop.
    config.image_size = 224
    config.blocks = (3, 4, 6, 3)
    config.channels = (256, 512, 1024, 2048)
    config.bottleneck = True
    config.cross_replica = False  # BatchNorm over the batch of all devices, not over each one's.
    config.precision = "params=float32,compute=bfloat16,output=float32"
    config.batch_size = 8192
    config.num_epochs = 90
    config.warmup_epochs = 5
    config.lars = variant == "lars"
    config.label_smoothing = 0.0
    config.weight_decay = 1e-4
    # References: they follow when the fields that they are made of are overridden.
    examples, batch_size = config.get_ref("train_examples"), config.get_ref("batch_size")
    config.learning_rate = 0.1 * batch_size.to_float() / 256
    config.num_steps = config.get_ref("num_epochs") * examples // batch_size
    config.eval_every = config.checkpoint_every = examples // batch_size
    if variant == "lars":
        config.learning_rate = 10.0
        config.label_smoothing = 0.1
    return config


class ImageNetResNet(haikutrain.Experiment):
    def loss(self, batch, is_training):
        c = self.config
        axis = haikutrain.AXIS if c.cross_replica else None
        norm: Any = {"decay_rate": 0.9, "cross_replica_axis": axis}
        network = hk.nets.ResNet(
            c.blocks,
            c.classes,
            bn_config=norm,
            bottleneck=c.bottleneck,
            channels_per_group=c.channels,
            logits_config={"w_init": hk.initializers.RandomNormal(0.01)},
        )
        logits = network((batch["image"] - MEAN) / STD, is_training)
        targets = jax.nn.one_hot(batch["label"], c.classes)
        if is_training:
            targets = optax.smooth_labels(targets, c.label_smoothing)
        best = jax.lax.top_k(logits, min(5, c.classes))[1] == batch["label"][:, None]
        metrics = {"accuracy": best[:, 0], "top5_accuracy": best.any(axis=1)}
        return optax.softmax_cross_entropy(logits, targets), metrics

    def learning_rate(self, step):
        """Rises for some epochs; then falls in steps, or for LARS along a parabola."""
        c = self.config
        epoch = step / (c.train_examples / c.batch_size)
        warm = jnp.minimum(epoch / c.warmup_epochs, 1)
        if c.lars:
            left = (c.num_epochs - epoch) / (c.num_epochs - c.warmup_epochs)
            return c.learning_rate * warm * jnp.clip(left, 0, 1) ** 2
        first = min(0.1, c.learning_rate)
        falls = jnp.sum(epoch >= c.num_epochs * np.array([30, 60, 80]) / 90)
        return (first + (c.learning_rate - first) * warm) * 0.1**falls

    def optimizer(self):
        c, mask = self.config, haikutrain.decay_mask()
        decay = optax.add_decayed_weights(c.weight_decay, mask)
        rate = haikutrain.scale_by_learning_rate(self.learning_rate)
        if c.lars:
            trust = optax.masked(optax.scale_by_trust_ratio(trust_coefficient=0.001), mask)
            return optax.chain(decay, trust, rate, optax.trace(0.9))
        return optax.chain(decay, optax.trace(0.9, nesterov=True), rate)

    def train_data(self):
        c, source = self.config, self.source("train")
        if len(source) != c.train_examples:
            raise haikutrain.UsageError(
                f"config.train_examples={c.train_examples}, by which epochs are counted, but "
                f"{c.data_dir} has {len(source)}; set it to that"
            )
        dataset = grain.MapDataset.source(source).seed(c.seed).shuffle().repeat()
        dataset = dataset.random_map(functools.partial(random_crop, size=c.image_size))
        return haikutrain.GrainDataset(dataset, c.batch_size, num_workers=c.workers)

    def eval_data(self):
        c = self.config
        dataset = grain.MapDataset.source(self.source("val"))
        dataset = dataset.map(functools.partial(central_crop, size=c.image_size))
        return {"val": haikutrain.GrainDataset(dataset, c.batch_size, num_workers=c.workers)}

    def source(self, split):
        """Random access to `{"image": uint8 [H, W, 3], "label": int}`, H and W of any size."""
        c, folder = self.config, pathlib.Path(self.config.data_dir)
        try:
            if shards := sorted(folder.glob(f"{split}*.array_record*")):
                return readers.array_record(shards, decode)
            train = readers.image_folder(folder / "train")
            names = train.class_names
            source = train if split == "train" else readers.image_folder(folder / split, names)
        except haikutrain.UsageError as error:
            raise haikutrain.UsageError(
                f"config.data_dir={c.data_dir!r}: {error}; wanted are {WANTED}"
            ) from error
        if len(names) != c.classes:
            raise haikutrain.UsageError(
                f"config.classes={c.classes}, but {folder / 'train'} has {len(names)} folders; "
                "set it to that"
            )
        return source


def decode(record):
    """An example from an array_record: the label in 4 bytes, little-endian, and the file."""
    image = np.array(Image.open(io.BytesIO(record[4:])).convert("RGB"))
    return {"image": image, "label": int.from_bytes(record[:4], "little")}


def random_crop(example, rng, size):
    """A window of 8 to 100 % of the area and 3:4 to 4:3, resized; mirrored every other time."""
    height, width, _ = example["image"].shape
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        sides = np.rint([math.sqrt(area * ratio), math.sqrt(area / ratio)])
        if (sides >= 1).all() and (sides <= (width, height)).all():
            corner = rng.integers(np.array([width, height]) - sides, endpoint=True)
            image = resized(example["image"], corner, sides, size)
            return {**example, "image": image[:, ::-1] if rng.random() < 0.5 else image}
    return central_crop(example, size)


def central_crop(example, size):
    """The middle of the picture: what size x size pixels are when the short side has 8/7 size."""
    height, width, _ = example["image"].shape
    sides = np.array([7 / 8 * min(height, width)] * 2)
    corner = (np.array([width, height]) - sides) / 2
    return {**example, "image": resized(example["image"], corner, sides, size)}


def resized(image, corner, sides, size):
    """A window (its left upper corner, its width and height) as uint8 `[size, size, 3]`."""
    box = (*corner, *(corner + sides))
    return np.asarray(
        Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR, box=box)
    )
