"""ImageNet's ResNet on pictures that are drawn here: three classes, of many sizes."""

import functools
import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import haikutrain
from haikutrain import config_file

FILE = pathlib.Path(__file__).parents[1] / "experiments" / "imagenet_resnet.py"
FLOAT32 = "params=float32,compute=float32,output=float32"
TINY = {
    "classes": 3,
    "train_examples": 96,
    "workers": 0,
    "image_size": 32,
    "blocks": "(1,1,1,1)",
    "channels": "(16,16,32,32)",
    "bottleneck": False,
    "cross_replica": True,
    "batch_size": 16,
    "num_epochs": 12,
    "warmup_epochs": 1,
    "learning_rate": 0.1,
    "eval_every": 72,
    "log_every": 2,
}


def flags(changes):
    return [f"--config.{name}={value}" for name, value in changes.items()]


def make(variant="sgd", **changes):
    loaded = config_file.load(f"{FILE}:{variant}", flags(changes))
    return loaded.experiment_class(loaded.config)


def draw(rng, kind):
    """Stripes across, stripes down, or a disc, in two colours far apart: uint8 `[H, W, 3]`."""
    height, width = rng.integers(40, 72, 2)
    y, x = np.mgrid[:height, :width]
    period, phase = rng.integers(6, 12), rng.integers(12)
    disc = np.hypot(y - height / 2, x - width / 2) < min(height, width) / 3
    shape = [(y + phase) // (period // 2) % 2, (x + phase) // (period // 2) % 2, disc][kind]
    colours = rng.integers(0, 100, 3), rng.integers(156, 256, 3)
    return np.where(shape[..., None] > 0, *colours).astype(np.uint8)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with 32 pictures a class to train with, and 22 held out: 7, 7 and 8."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, counts in (("train", (32, 32, 32)), ("val", (7, 7, 8))):
        for kind, name in enumerate(("across", "down", "of_discs")):
            (folder / split / name).mkdir(parents=True)
            for i in range(counts[kind]):
                path = folder / split / name / f"{i:02}.JPEG"
                Image.fromarray(draw(rng, kind)).save(path, quality=90)
    return folder


@pytest.fixture(scope="module")
def tiny(pictures):
    """Makes the experiment small, on the pictures."""
    return lambda variant="sgd", **changes: make(
        variant, **{**TINY, "data_dir": pictures, **changes}
    )


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """An experiment, its state and its workdir, after 12 epochs."""
    experiment, workdir = tiny(), tmp_path_factory.mktemp("trained")
    return experiment, haikutrain.train(experiment, workdir), workdir


@pytest.fixture(scope="module")
def exact(tiny, tmp_path_factory):
    """The same in float32, after 4 steps."""
    experiment = tiny(precision=FLOAT32, stop_after=4, log_every=1)
    workdir = tmp_path_factory.mktemp("exact")
    return experiment, haikutrain.train(experiment, workdir), workdir


def test_it_learns(trained):
    experiment, state, workdir = trained
    assert int(state.step) == 12 * 96 // 16
    found = haikutrain.evaluate(experiment, workdir)["val"]
    assert found["accuracy"] > 0.8  # By chance it is 1 / 3.
    assert found["top5_accuracy"] == 1.0


def test_a_resumed_run_is_the_straight_one(trained, tiny, tmp_path, log_lines):
    _, _, workdir = trained

    def start(folder, stop):
        state = haikutrain.train(tiny(stop_after=stop), tmp_path / folder)
        return haikutrain.digest(state), log_lines(tmp_path / folder)

    start("stopped", 3)
    assert start("stopped", 8) == (straight := start("straight", 8))
    assert straight[1] == log_lines(workdir)[:4]


def test_one_device_and_workers_do_as_four_devices(exact, pictures, tmp_path, main, log_lines):
    changes = {"precision": FLOAT32, "stop_after": 4, "log_every": 1}
    main(
        f"--config={FILE}",
        f"--workdir={tmp_path}",
        "--cpu_devices=1",
        *flags({**TINY, **changes, "data_dir": pictures, "workers": 2}),
    )
    four, one = log_lines(exact[2]), log_lines(tmp_path)
    assert [line["step"] for line in one] == [1, 2, 3, 4]
    for a, b in zip(four, one, strict=True):
        assert a.pop("split") == b.pop("split") == "train"
        assert a == pytest.approx(b, rel=1e-3)


def test_every_held_out_picture_counts_once(exact, pictures):
    # 22 pictures in batches of 16 on 4 devices, against all at once by hand.
    experiment, state, workdir = exact
    found = haikutrain.evaluate(experiment, workdir)["val"]
    paths = sorted(pictures.glob("val/*/*.JPEG"))
    batch = {
        "image": [],
        "label": [["across", "down", "of_discs"].index(p.parent.name) for p in paths],
    }
    for path in paths:
        picture = Image.open(path)
        side = min(picture.size) * 224 / 256
        left, top = ((length - side) / 2 for length in picture.size)
        box = (left, top, left + side, top + side)
        batch["image"].append(np.asarray(picture.resize((32, 32), Image.BILINEAR, box)))
    batch = {name: np.array(values) for name, values in batch.items()}
    network = hk.transform_with_state(lambda: experiment.loss(batch, is_training=False))
    (losses, metrics), _ = network.apply(state.params, state.network_state, None)
    assert losses.shape == (22,)
    assert found["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float(metrics["accuracy"].mean()), rel=1e-6)


def test_records_are_the_pictures_of_the_folder(pictures, tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    paths = sorted(pictures.glob("train/*/*.JPEG"))
    labels = [["across", "down", "of_discs"].index(path.parent.name) for path in paths]
    for shard in range(2):
        name = f"train-{shard:05}-of-00002.array_record"
        writer = ArrayRecordWriter(str(tmp_path / name), "group_size:1")
        for i in range(48 * shard, 48 * shard + 48):
            writer.write(labels[i].to_bytes(4, "little") + paths[i].read_bytes())
        writer.close()
    folder, records = (make(**{**TINY, "data_dir": d}) for d in (pictures, tmp_path))
    assert len(records.source("train")) == 96
    for i in (0, 47, 48, 95):
        a, b = folder.source("train")[i], records.source("train")[i]
        np.testing.assert_array_equal(a["image"], b["image"])
        assert a["label"] == b["label"] == labels[i]
    a, b = (experiment.train_data().batch(2) for experiment in (folder, records))
    np.testing.assert_array_equal(a["image"], b["image"])


def test_windows_are_of_the_area_and_shape_that_the_recipe_says():
    random_crop = make().train_data.__func__.__globals__["random_crop"]
    y, x = np.mgrid[:128, :96]
    image = np.stack([2 * y, 2 * x, 0 * x], axis=-1).astype(np.uint8)  # It says where it is.
    areas, ratios, mirrored = [], [], []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        example = random_crop({"image": image, "label": 7}, rng, 16)
        assert (example["image"].shape, example["image"].dtype) == ((16, 16, 3), np.uint8)
        assert example["label"] == 7
        # From the centre of the first pixel to that of the last it is 15/16 of a side.
        down, right = (
            (float(end) - float(begin)) / 2 * 16 / 15
            for begin, end in (example["image"][[0, -1], 8, 0], example["image"][8, [0, -1], 1])
        )
        areas.append(down * abs(right) / (128 * 96))
        ratios.append(abs(right) / down)
        mirrored.append(right < 0)
    assert (min(areas), max(areas)) == pytest.approx((0.09, 0.97), abs=0.05)
    assert 0.7 < min(ratios) < max(ratios) < 1.43
    # Of areas from 0.08 to 1 the mean is 0.54; the largest often do not fit.
    assert np.mean(areas) == pytest.approx(0.48, abs=0.06)
    assert np.mean(mirrored) == pytest.approx(0.5, abs=0.1)


def test_the_schedules_are_those_of_the_papers():
    sgd, lars = make("sgd"), make("lars")
    assert sgd.config.learning_rate == 3.2  # 0.1 * 8192 / 256
    assert sgd.config.num_steps == lars.config.num_steps == 90 * 1_281_167 // 8192
    assert make("sgd", batch_size=256).config.learning_rate == pytest.approx(0.1)

    def at(experiment, epoch):
        step = jnp.float32(epoch * 1_281_167 / 8192)
        return float(experiment.learning_rate(step))

    by_hand = {0: 0.1, 2.5: 1.65, 5: 3.2, 29.9: 3.2, 30.1: 0.32, 60.1: 0.032, 80.1: 0.0032}
    for epoch, rate in by_hand.items():
        assert at(sgd, epoch) == pytest.approx(rate, rel=1e-4)
    for epoch, rate in {0: 0.0, 2.5: 5.0, 5: 10.0, 47.5: 2.5, 90: 0.0}.items():
        assert at(lars, epoch) == pytest.approx(rate, rel=1e-4, abs=1e-6)


def test_the_optimizers_by_hand():
    params = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([2.0])}
    grads = {"w": jnp.array([0.0, 1.0]), "b": jnp.array([1.0])}
    updates = {}
    for variant in ("sgd", "lars"):
        optimizer = make(variant, weight_decay=0.5, learning_rate=2.0).optimizer()
        state = optimizer.init(params)
        updates[variant], _ = optimizer.update(grads, state, params, step=jnp.int32(2000))
    # u = g + 0.5 w = (1.5, 3); sgd: -2 * 1.9 u; lars: -2 * 0.001 * |w| / |u| * u, |w| = 5.
    u = np.array([1.5, 3.0])
    np.testing.assert_allclose(updates["sgd"]["w"], -3.8 * u, rtol=1e-5)
    np.testing.assert_allclose(updates["sgd"]["b"], [-3.8], rtol=1e-5)
    rate = 2 * ((90 - 2000 * 8192 / 1_281_167) / 85) ** 2
    expected = -rate * 0.001 * 5 / np.hypot(1.5, 3.0) * u
    np.testing.assert_allclose(updates["lars"]["w"], expected, rtol=1e-4)
    np.testing.assert_allclose(updates["lars"]["b"], [-rate], rtol=1e-4)


def test_the_whole_network_is_the_one_known_as_resnet_50():
    experiment = make()
    batch = {"image": np.zeros((2, 224, 224, 3), np.uint8), "label": np.zeros(2, np.int32)}
    network = hk.transform_with_state(functools.partial(experiment.loss, is_training=True))
    params, _ = jax.eval_shape(network.init, jax.random.key(0), batch)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 25_557_032
    scales = [p["scale"] for name, p in params.items() if name.endswith("batchnorm_2")]
    assert len(scales) == 16


def test_what_is_wrong_with_the_folder_is_said(tiny, pictures, tmp_path):
    with pytest.raises(haikutrain.UsageError, match=r"wanted are train/CLASS/\*.JPEG .*ILSVRC2012"):
        tiny(data_dir=tmp_path / "nowhere").train_data()
    with pytest.raises(haikutrain.UsageError, match=r"train_examples=1281167, .* has 96"):
        tiny(train_examples=1_281_167).train_data()
    with pytest.raises(haikutrain.UsageError, match=r"classes=1000, but .*train has 3 folders"):
        tiny(classes=1000).train_data()
