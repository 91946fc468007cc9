"""experiments/byol.py: what it computes, that it learns, resumes, and hands its encoder on."""

import json
import pathlib
import sys

import haiku as hk
import jax
import numpy as np
import pytest

import haikutrain
from haikutrain import config_file, evaluation, leaves, start
from haikutrain.checkpoint import Checkpointer

FILE = pathlib.Path(__file__).parents[1] / "experiments/byol.py"
TINY = {
    "channels": (4, 8),
    "hidden": 8,
    "projection": 4,
    "batch_size": 16,
    "log_every": 1,
    "warmup_steps": 0,
}
# The same file, but both views are the picture itself: no keys, so nothing depends on the device.
STILL = """

class Byol(Byol):
    def views(self, rngs, images):
        return jnp.stack([images, images[:, ::-1]], axis=1)
"""


def load(variant="pretrain", file=FILE, **changes):
    loaded = config_file.load(f"{file}:{variant}")
    for name, value in changes.items():
        field = loaded.config.optimizer if name in loaded.config.optimizer else loaded.config
        field[name] = value
    return loaded.experiment_class(loaded.config)


def module_of(experiment):
    return sys.modules[type(experiment).__module__]


def test_the_targets_decay_goes_along_half_a_cosine_to_1():
    decay = module_of(load()).target_decay
    values = [float(decay(step, 0.9, 4)) for step in range(5)]
    # 1 - 0.1 (cos(pi step / 4) + 1) / 2
    np.testing.assert_allclose(values, [0.9, 0.914645, 0.95, 0.985355, 1.0], atol=1e-6)


def test_the_loss_is_the_distance_to_the_targets_projection_of_the_other_view():
    experiment = load(**TINY)
    rng = np.random.default_rng(0)
    batch = {
        "views": rng.uniform(size=(6, 2, 8, 8, 1)).astype(np.float32),
        "targets": rng.normal(size=(6, 2, 4)).astype(np.float32),
    }
    seen = []

    def spy(method, args, kwargs, context):
        result = method(*args, **kwargs)
        if context.module.name == "predictor":
            seen.append(result)
        return result

    def forward(batch):
        with hk.intercept_methods(spy):
            losses, _ = experiment.loss(batch, True)
        return losses, seen.pop()

    network = hk.transform_with_state(forward)

    def run(batch):
        params, state = network.init(jax.random.PRNGKey(0), batch)
        return network.apply(params, state, None, batch)[0]

    alone = jax.tree.map(lambda x: x[None], batch)
    losses, predictions = jax.jit(jax.vmap(run, axis_name=haikutrain.AXIS))(alone)
    p, t = np.asarray(predictions[0]).reshape(6, 2, 4), batch["targets"]
    p, t = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (p, t))
    expected = (2 - 2 * (p[:, 0] * t[:, 1]).sum(-1)) + (2 - 2 * (p[:, 1] * t[:, 0]).sum(-1))
    np.testing.assert_allclose(losses[0], expected, atol=1e-5)


@pytest.fixture(scope="module")
def updates(drive):
    """The states at 0, 1, 2 and 3, of a run whose rate is 0.5 and whose target's decay 0.5."""
    changes = {"learning_rate": 0.5, "target_decay": 0.5, "weight_decay": 1e4}
    return drive(load(**TINY, **changes, num_steps=3), 3)[0]


def test_the_target_network_is_the_average_of_encoder_and_projector(updates):
    old, new = updates[:2]
    modules = {name.split("/")[0] for name in new.target_params}
    assert modules == {"encoder", "projector"}
    for name, params in new.target_params.items():
        for leaf, value in params.items():
            average = 0.5 * old.target_params[name][leaf] + 0.5 * new.params[name][leaf]
            np.testing.assert_allclose(value, average, atol=1e-6)


def test_both_networks_batchnorms_count_each_update_once(updates):
    for step, state in enumerate(updates):
        for tree, norms in ((state.network_state, 4), (state.target_network_state, 3)):
            table = leaves.leaf_table(tree)
            counters = [x for path, x in table.items() if path.endswith("mean_ema/counter")]
            assert [int(x) for x in counters] == [step] * norms


def test_lars_scales_weights_and_leaves_biases_and_norms_alone(updates):
    """A first step is rate * 0.001 * |p| long for a weight, whatever its gradient and decay."""
    before, after = (leaves.leaf_table(state.params) for state in updates[:2])
    lengths = {path: np.linalg.norm(after[path] - before[path]) for path in before}
    for path, length in lengths.items():
        scaled = 0.5 * 1e-3 * np.linalg.norm(before[path])
        if path.endswith("/w"):
            assert length == pytest.approx(scaled, rel=1e-3)
        else:
            # Decayed by 1e4, a norm's scale of 1 would move by thousands; scaled, by 0.0005.
            assert length < 10
            assert path.endswith("/b") or length > 2 * scaled
    assert {path.rpartition("/")[2] for path in lengths} == {"w", "b", "offset", "scale"}


def test_the_probe_fits_the_rows_it_is_given_alone():
    probe = module_of(load()).probe
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 400)
    features = np.eye(10)[labels] + 0.1 * rng.normal(size=(400, 10))
    fitted = np.arange(400) < 100
    assert probe(features, labels, fitted, ~fitted) == 1.0
    # Labels turned in the fitted rows, the fewer ones: each tested row is now called wrongly.
    turned = np.where(fitted, (labels + 1) % 10, labels)
    assert probe(features, turned, fitted, ~fitted) == 0.0


SHORT = {"num_steps": 200, "batch_size": 64, "hidden": 64, "warmup_steps": 20, "log_every": 20}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run: its folder and the lines of its log."""
    workdir = tmp_path_factory.mktemp("byol")
    haikutrain.train(load(**SHORT), workdir)
    log = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return workdir, log


def test_features_learnt_without_labels_are_better_than_those_of_an_untrained_encoder(run):
    _, log = run
    task = start.Task(load(**SHORT))
    untrained = evaluation.evaluate_splits(task, task.programs.init())["probe"].scalars
    trained = log[-1]
    losses = [line["loss"] for line in log if line["split"] == "train"]
    assert "label" not in task.feed.fingerprint()["row"]
    assert losses[-1] < 0.6 * losses[0]
    # Of 360 test pictures, by a linear classifier of 100 and of 1437 labelled ones.
    assert trained["accuracy_100"] > untrained["accuracy_100"] + 0.03
    assert trained["accuracy"] > untrained["accuracy"] + 0.01


def test_a_linear_head_trains_on_the_encoder_and_averages_as_they_were(run, tmp_path):
    source, _ = run
    changes = {"restore_from": str(source), "num_steps": 200, "learning_rate": 0.5}
    changes["weight_decay"] = 1e-4  # Of the head: it would move the encoder too, were it free.
    state = haikutrain.train(load("linear", **changes), tmp_path)
    found = leaves.leaf_table({"params": state.params, "network_state": state.network_state})
    saved = Checkpointer(source / "checkpoints", read_only=True).read(200).state
    encoder = {path: array for path, array in found.items() if "/encoder/" in path}
    assert len(encoder) == 3 * (3 + 6)
    for path, array in encoder.items():
        np.testing.assert_array_equal(array, saved[path])
    assert {path for path in found if path not in encoder} == {"params/head/w", "params/head/b"}
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["accuracy"] > 0.93


def test_a_run_stopped_and_resumed_is_the_straight_one(tmp_path, log_lines):
    changes = {**TINY, "num_steps": 6, "accumulate_steps": 2, "ema_decay": 0.9}
    straight = haikutrain.train(load(**changes), tmp_path / "straight")
    for stop in (1, 4, None):
        state = haikutrain.train(load(**changes, stop_after=stop), tmp_path / "stopped")
    assert haikutrain.digest(state) == haikutrain.digest(straight)
    for split in ("train", "probe"):
        lines = log_lines(tmp_path / "stopped", split)
        assert lines == log_lines(tmp_path / "straight", split)
    assert len(lines) == 1


def test_without_random_views_the_devices_do_not_matter(tmp_path, main, log_lines):
    file = tmp_path / "still.py"
    file.write_text(FILE.read_text() + STILL)
    haikutrain.train(load(file=file, **TINY, num_steps=5), tmp_path / "4")
    fields = [f"--config.{name}={value}" for name, value in {**TINY, "num_steps": 5}.items()]
    fields = [field.replace("config.warmup", "config.optimizer.warmup") for field in fields]
    main(f"--config={file}", f"--workdir={tmp_path}/1", "--cpu_devices=1", *fields)
    for split, count in (("train", 5), ("probe", 1)):
        one, four = (log_lines(tmp_path / devices, split) for devices in "14")
        assert len(one) == len(four) == count
        for a, b in zip(one, four, strict=True):
            assert a.pop("split") == b.pop("split")
            assert a == pytest.approx(b, rel=1e-4)


def test_a_misspelt_variant_is_said():
    with pytest.raises(haikutrain.UsageError, match="no variant 'liner'"):
        load("liner")
