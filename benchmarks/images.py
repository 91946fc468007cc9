"""Pictures from files: the pipeline of `experiments/imagenet_resnet.py`, against Pillow by hand.

    python benchmarks/images.py

About 3 minutes on two cores. A folder of drawn JPEG pictures is decoded, cropped at random, resized
and stacked to batches on the host: by the experiment's own `train_data`, in threads and in 2 worker
processes, and by a loop in one process. Both sides in turn, in chunks.

The pipeline works ahead. So that it does so at neither side's cost, its chunk begins by drawing
what lies ready, off the clock, and ends by waiting until it has filled its buffers again.
"""

import argparse
import contextlib
import dataclasses
import math
import pathlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import cases
import numpy as np
import pairs
from PIL import Image, ImageDraw

from haikutrain import config_file, devices

PICTURES = 256
CLASSES = 4
SIZE = 224
BATCH = 32
CHUNK = 8
"""Batches."""
AHEAD = 5
"""Batches: more than lie ready in any of the pipelines here."""
# Worker processes (0 for threads), target.
RUNS = [(0, 1.0), (2, 1.5)]


def draw(folder: pathlib.Path) -> None:
    """Writes `train/<class>/<number>.JPEG`: about 256 x 256, coarse noise, ellipses, grain."""
    rng = np.random.default_rng(0)
    for number in range(PICTURES):
        width, height = map(int, rng.integers(224, 289, 2))
        coarse = rng.integers(0, 256, (12, 12, 3), np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        for _ in range(8):
            x, y = rng.uniform(0, (width, height))
            w, h = rng.uniform(8, 64, 2)
            color = tuple(map(int, rng.integers(0, 256, 3)))
            ImageDraw.Draw(image).ellipse((x - w, y - h, x + w, y + h), fill=color)
        pixels = np.asarray(image) + rng.normal(0, 6, (height, width, 3))
        home = folder / "train" / f"class{number % CLASSES}"
        home.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(home / f"{number}.JPEG", quality=90)


# --- the framework ---


def train_data(folder: pathlib.Path, workers: int) -> Any:
    """The experiment's own."""
    loaded = config_file.load(str(cases.ROOT / "experiments" / "imagenet_resnet.py"))
    config = loaded.config
    config.data_dir, config.classes, config.train_examples = str(folder), CLASSES, PICTURES
    config.image_size, config.batch_size, config.workers = SIZE, BATCH, workers
    return loaded.experiment_class(config).train_data()


def chunk_of(batches: Iterator[Any]) -> Callable[[], float]:
    """Seconds of a chunk in the steady state."""

    def chunk() -> float:
        for _ in range(AHEAD):
            next(batches)
        started = time.perf_counter()
        for _ in range(CHUNK):
            check(next(batches))
        seconds = time.perf_counter() - started
        time.sleep(1.5 * AHEAD * seconds / CHUNK)
        return seconds

    return chunk


# --- by hand ---


def by_hand(folder: pathlib.Path) -> Iterator[dict[str, np.ndarray]]:
    """Batches by a loop: shuffled anew each epoch, cropped and mirrored at random."""
    names = sorted(path.name for path in (folder / "train").iterdir())
    files = [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted((folder / "train" / name).iterdir())
    ]
    rng = random.Random(0)
    while True:
        rng.shuffle(files)
        for start in range(0, len(files) - BATCH + 1, BATCH):
            images, labels = [], []
            for path, label in files[start : start + BATCH]:
                with Image.open(path) as image:
                    images.append(cropped(image.convert("RGB"), rng))
                labels.append(label)
            yield {"image": np.stack(images), "label": np.array(labels)}


def cropped(image: Image.Image, rng: random.Random) -> np.ndarray:
    """8 to 100 % of the area, 3:4 to 4:3, as uint8 `[SIZE, SIZE, 3]`; the middle if none fits."""
    width, height = image.size
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 1 <= w <= width and 1 <= h <= height:
            x, y = rng.randint(0, width - w), rng.randint(0, height - h)
            break
    else:
        w = h = round(7 / 8 * min(width, height))
        x, y = (width - w) // 2, (height - h) // 2
    pixels = np.asarray(
        image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=(x, y, x + w, y + h))
    )
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def chunk_by_hand(batches: Iterator[Any]) -> Callable[[], float]:
    def chunk() -> float:
        started = time.perf_counter()
        for _ in range(CHUNK):
            check(next(batches))
        return time.perf_counter() - started

    return chunk


def measure_workers(folder: pathlib.Path, workers: int, number: int) -> pairs.Row:
    """So many worker processes against one, by the pipeline alone."""
    with contextlib.ExitStack() as stack:
        made = [train_data(folder, count).batches(0) for count in (workers, 1)]
        sides = [chunk_of(stack.enter_context(contextlib.closing(batches))) for batches in made]
        for side in sides:
            side()
        row = pairs.compare(
            f"{workers} workers against 1", *sides, number, per=CHUNK * BATCH, target=0.9 * workers
        )
    return dataclasses.replace(row, first=1e6 / row.first, second=1e6 / row.second, unit="images/s")


# --- both ---


def check(batch: dict[str, np.ndarray]) -> None:
    assert batch["image"].shape == (BATCH, SIZE, SIZE, 3)
    assert batch["image"].dtype == np.uint8
    assert batch["label"].shape == (BATCH,)


def measure(folder: pathlib.Path, workers: int, number: int, target: float) -> pairs.Row:
    name = f"{workers} worker processes" if workers else "threads"
    with contextlib.closing(train_data(folder, workers).batches(0)) as batches:
        sides = chunk_of(batches), chunk_by_hand(by_hand(folder))
        for side in sides:  # The first chunk starts the workers.
            side()
        row = pairs.compare(name, *sides, number, per=CHUNK * BATCH, target=target)
    rates = {"first": 1e6 / row.first, "second": 1e6 / row.second}
    return dataclasses.replace(row, **rates, unit="images/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    devices.simulate(1)
    with tempfile.TemporaryDirectory() as folder:
        draw(pathlib.Path(folder))
        rows = [
            measure(pathlib.Path(folder), workers, options.pairs, target)
            for workers, target in RUNS
        ]
        scaled = measure_workers(pathlib.Path(folder), RUNS[-1][0], options.pairs)
    pairs.show(rows, "haikutrain", "by hand")
    pairs.show([scaled], "many workers", "one")


if __name__ == "__main__":
    main()
