"""What an update moves and a save writes, counted from the program, for some networks.

    python benchmarks/counts.py

Half a minute: nothing is compiled and nothing timed. On 8 simulated devices: the operands of the
update's all-reduces and their bytes, the leaves and bytes of the state. `docs/scale.md` reckons
with these numbers.
"""

import math
import re
from typing import Any

import cases
import haiku as hk
import jax
import numpy as np
import optax

import haikutrain
from haikutrain import devices
from haikutrain.start import Task

DEVICES = 8


class ResNet50(haikutrain.Experiment):
    """Haiku's, on pictures of ImageNet's size, with SGD and momentum."""

    def loss(self, batch: Any, is_training: bool) -> Any:
        logits = hk.nets.ResNet50(1000)(batch["image"] / 127.5 - 1, is_training)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {"accuracy": logits.argmax(-1) == batch["label"]}

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(0.1, momentum=0.9)

    def train_data(self) -> Any:
        size = self.config.batch_size
        arrays = {"image": np.zeros((size, 224, 224, 3), np.uint8), "label": np.zeros(size, int)}
        return haikutrain.ArrayDataset(arrays, size, seed=0)


class Transformer(haikutrain.Experiment):
    """Of GPT-2's small shape (12 layers of 768), with Adam."""

    def loss(self, batch: Any, is_training: bool) -> Any:
        width, vocabulary = 768, 50257
        embedding = hk.get_parameter(
            "embedding", [vocabulary, width], init=hk.initializers.Constant(0)
        )
        x = embedding[batch["text"]]
        for _ in range(12):
            y = hk.LayerNorm(-1, True, True)(x)
            w_init = hk.initializers.VarianceScaling(1.0)
            x = x + hk.MultiHeadAttention(12, 64, w_init=w_init)(y, y, y)
            y = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.Linear(width)(jax.nn.gelu(hk.Linear(4 * width)(y)))
        logits = hk.LayerNorm(-1, True, True)(x) @ embedding.T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["text"])
        return losses.mean(axis=1), {}

    def optimizer(self) -> optax.GradientTransformation:
        return optax.adam(1e-4)

    def train_data(self) -> Any:
        text = np.zeros((self.config.batch_size, 128), np.int32)
        return haikutrain.ArrayDataset({"text": text}, self.config.batch_size, seed=0)


def experiments() -> dict[str, haikutrain.Experiment]:
    config = cases.endless(haikutrain.base_config())
    config.batch_size = DEVICES
    return {
        "MLP with BatchNorm": cases.mlp().experiment,
        "ResNet-18, CIFAR": cases.resnet18().experiment,
        "ResNet-50, ImageNet": ResNet50(config),
        "Transformer, 12 x 768": Transformer(config),
    }


def count(experiment: haikutrain.Experiment) -> list[int]:
    """Leaves and bytes of the state; operands and bytes of the update's all-reduces."""
    made = Task(experiment).programs
    program = made._update_program(1)
    text = program._pmapped.lower(*program._shapes).as_text()
    reduced = all_reduced(text)
    leaves = jax.tree.leaves(made.state)
    return [
        len(leaves),
        sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        len(reduced),
        4 * sum(reduced),
    ]


def all_reduced(text: str) -> list[int]:
    """The sizes of the all-reduces' operands, float32 all of them."""
    sizes = []
    for found in re.finditer(r'"stablehlo.all_reduce"', text):
        signature = re.search(r"\}\) : \(([^)]*)\) ->", text[found.start() :])
        assert signature is not None
        for shape in re.findall(r"tensor<((?:\d+x)*)(\w+)>", signature[1]):
            assert shape[1] == "f32", signature[1]
            sizes.append(math.prod(int(n) for n in shape[0].split("x") if n))
    return sizes


def main() -> None:
    devices.simulate(DEVICES)
    head = ["", "leaves", "state, MB", "all-reduced operands", "all-reduced, MB"]
    lines = [head]
    for name, experiment in experiments().items():
        leaves, held, operands, moved = count(experiment)
        lines.append([name, f"{leaves}", f"{held / 1e6:.3f}", f"{operands}", f"{moved / 1e6:.3f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    main()
