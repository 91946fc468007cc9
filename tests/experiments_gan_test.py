"""experiments/gan.py: what it computes, that it learns, and that it resumes."""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from PIL import Image

import haikutrain
from haikutrain import config_file, evaluation, leaves, start

FILE = pathlib.Path(__file__).parents[1] / "experiments/gan.py"
TINY = {"channels": 8, "latents": 4, "batch_size": 16, "log_every": 1}
# The same file, but its latents come from the pictures: no keys, so nothing depends on the device.
STILL = """

class Gan(Gan):
    def latents(self, rngs, batch):
        return batch["image"][:, 2:6, 3, 0] - 0.5
"""


def load(file=FILE, **changes):
    loaded = config_file.load(str(file))
    loaded.config.update(changes)
    return loaded.experiment_class(loaded.config)


def test_the_frechet_distance_of_four_points():
    distance = sys.modules[type(load()).__module__].frechet_distance
    cross = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], np.float32).reshape(4, 1, 2, 1)
    assert distance(cross, cross) == pytest.approx(0, abs=1e-6)
    # Means (0, 0) and (3, 4); covariances I * 2 / 3 and 4 times that.
    shift = np.array([3, 4], np.float32).reshape(1, 1, 2, 1)
    assert distance(cross, cross + shift) == pytest.approx(25)
    assert distance(cross, 2 * cross) == pytest.approx(2 * (1 + 4 - 2 * 2) * 2 / 3)


@pytest.fixture(scope="module")
def updates(drive):
    changes = {"generator_rate": 0.01, "discriminator_rate": 0.03, "average_decay": 0.75}
    return drive(load(**TINY, **changes), 12)[0]


def test_each_network_has_an_optimizer_of_its_own(updates):
    """Adam's first step without momentum is as large as the rate, for any gradient but 0."""
    before, after = updates[0].params, updates[1].params
    for network, rate in (("generator", 0.01), ("discriminator", 0.03)):
        steps = jax.tree.map(lambda a, b: np.abs(a - b), before[network], after[network])
        sizes = np.concatenate([x.ravel() for x in jax.tree.leaves(steps)])
        assert sizes.max() == pytest.approx(rate, rel=1e-3)
        assert np.median(sizes) == pytest.approx(rate, rel=1e-2)


def test_the_average_follows_the_generator_and_counters_count(updates):
    before, after = (leaves.leaf_table(state.average) for state in updates[:2])
    new = leaves.leaf_table(
        {
            "params": updates[1].params["generator"],
            "network_state": updates[1].network_state["generator"],
        }
    )
    assert set(after) == set(new)
    for path, average in after.items():
        if path.endswith("counter"):
            assert average == new[path] == 1
        else:
            np.testing.assert_allclose(average, 0.75 * before[path] + 0.25 * new[path], atol=1e-6)


def test_the_spectral_norms_are_those_of_the_discriminators_weights(updates):
    """After eleven steps of power iteration, one an update, the estimates are near the truth."""
    params = leaves.leaf_table(updates[-2].params["discriminator"])
    sigmas = {
        path.partition("/spectral_norm")[0]: float(value)
        for path, value in leaves.leaf_table(updates[-1].network_state["discriminator"]).items()
        if path.endswith("sigma")
    }
    weights = {path[:-2]: w for path, w in params.items() if path.endswith("/w")}
    assert len(weights) == len(sigmas) == 4
    for module, weight in weights.items():
        true = np.linalg.svd(weight.reshape(-1, weight.shape[-1]), compute_uv=False)[0]
        assert sigmas[module] == pytest.approx(true, rel=0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run: its folder and the last line of its log."""
    workdir = tmp_path_factory.mktemp("gan")
    experiment = load(**SHORT)
    haikutrain.train(experiment, workdir)
    return workdir, json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])


SHORT = {"num_steps": 400, "channels": 16, "average_decay": 0.95}


def test_the_distance_to_held_out_pictures_falls_to_a_fifth(run):
    _, last = run
    task = start.Task(load(**SHORT))
    untrained = evaluation.evaluate_splits(task, task.programs.init())["eval"].scalars
    assert last["step"] == 400
    assert last["frechet_distance"] < untrained["frechet_distance"] / 5


def test_a_hundred_samples_are_drawn_in_one_picture(run):
    workdir, _ = run
    picture = np.asarray(Image.open(workdir / "media/eval-samples-400.png"))
    # Ten rows and columns of 8 pixels and a frame of one, each six times as large.
    assert picture.shape == (600, 600)
    cells = picture[3::6, 3::6].reshape(10, 10, 10, 10).swapaxes(1, 2).reshape(100, 10, 10)
    np.testing.assert_array_equal(cells[:, 0], np.full((100, 10), round(0.3 * 255), np.uint8))
    assert len(np.unique(cells[:, 1:-1, 1:-1].reshape(100, 64), axis=0)) == 100


def test_a_run_stopped_and_resumed_is_the_straight_one(tmp_path, log_lines):
    changes = {**TINY, "num_steps": 6, "eval_every": 3, "grad_clip_norm": 1.0}
    straight = haikutrain.train(load(**changes), tmp_path / "straight")
    for stop in (1, 4, None):
        state = haikutrain.train(load(**changes, stop_after=stop), tmp_path / "stopped")
    assert haikutrain.digest(state) == haikutrain.digest(straight)
    for split, steps in (("train", 6), ("eval", 2)):
        lines = log_lines(tmp_path / "stopped", split)
        assert lines == log_lines(tmp_path / "straight", split)
        assert len(lines) == steps


def test_without_random_latents_the_devices_do_not_matter(tmp_path, main, log_lines):
    file = tmp_path / "still.py"
    file.write_text(FILE.read_text() + STILL)
    changes = {**TINY, "num_steps": 4}
    haikutrain.train(load(file, **changes), tmp_path / "4")
    fields = [f"--config.{name}={value}" for name, value in changes.items()]
    main(f"--config={file}", f"--workdir={tmp_path}/1", "--cpu_devices=1", *fields)
    for split, count in (("train", 4), ("eval", 1)):
        one, four = (log_lines(tmp_path / devices, split) for devices in "14")
        assert len(one) == len(four) == count
        for a, b in zip(one, four, strict=True):
            assert a.pop("split") == b.pop("split")
            assert a == pytest.approx(b, rel=1e-3)
