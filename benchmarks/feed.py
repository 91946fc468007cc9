"""Arrays in memory: batches through the framework, against slicing NumPy by hand.

    python benchmarks/feed.py

About 2 minutes. Once onto the devices (the framework's `TrainFeed` against a slice and a
`device_put`), and once on the host alone (`ArrayDataset.batch` against `array[index]`).
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pairs
from peers import hand

import haikutrain
from haikutrain import devices
from haikutrain.feed import TrainFeed

CHUNK = 100


def data_sets() -> dict[str, tuple[dict[str, np.ndarray], int]]:
    """By name: arrays and batch size."""
    rng = np.random.default_rng(0)
    pictures = {
        "image": rng.integers(0, 256, (20_000, 32, 32, 3), np.uint8),
        "label": rng.integers(0, 10, 20_000).astype(np.int32),
    }
    return {"digits, 64": (haikutrain.digits("train"), 64), "32x32x3, 256": (pictures, 256)}


def timed(draw: Callable[[], Any]) -> Callable[[], float]:
    """Seconds of a chunk of batches, until the last is there."""

    def chunk() -> float:
        started = time.perf_counter()
        for _ in range(CHUNK):
            batch = draw()
        jax.block_until_ready(batch)
        return time.perf_counter() - started

    return chunk


def sliced(arrays: dict[str, np.ndarray], size: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches on the host, by hand."""
    rng = np.random.default_rng(0)
    examples = len(arrays["label"])
    while True:
        order = rng.permutation(examples)
        for start in range(0, examples - size + 1, size):
            index = order[start : start + size]
            yield {name: array[index] for name, array in arrays.items()}


def measure(name: str, arrays: dict[str, np.ndarray], size: int, number: int) -> list[pairs.Row]:
    dataset = haikutrain.ArrayDataset(arrays, size, seed=0)
    steps = iter(range(pairs.FAR))
    by_hand, placed_by_hand = sliced(arrays, size), hand.batches(arrays, size)
    plan = ((step, 1) for step in range(pairs.FAR))
    with TrainFeed(dataset, size).items(plan, None) as items:
        rows = []
        for place, first, second in (
            ("on devices", lambda: next(items).placed, lambda: next(placed_by_hand)),
            ("on the host", lambda: dataset.batch(next(steps)), lambda: next(by_hand)),
        ):
            sides = timed(first), timed(second)
            for side in sides:
                side()
            rows.append(pairs.compare(f"{name}, {place}", *sides, number, per=CHUNK, target=0.8))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--devices", type=int, default=1, help="simulated devices")
    options = parser.parse_args()
    devices.simulate(options.devices)
    rows = []
    for name, (arrays, size) in data_sets().items():
        rows.extend(measure(name, arrays, size, options.pairs))
    pairs.show(rows, "haikutrain", "by hand")


if __name__ == "__main__":
    main()
