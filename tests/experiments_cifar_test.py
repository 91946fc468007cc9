"""CIFAR's ResNet: learns up-scaled digits; resumes exactly; reads the real files' format."""

import json
import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haikutrain
from haikutrain import config_file

FILE = pathlib.Path(__file__).parents[1] / "experiments" / "cifar_resnet.py"
TINY = {"width": 4, "num_epochs": 4, "ema_decay": 0.9, "log_every": 2, "eval_every": 89}


def flags(changes):
    return [f"--config.{name}={value}" for name, value in changes.items()]


def make(variant="cifar10", **changes):
    loaded = config_file.load(f"{FILE}:{variant}", flags(changes))
    return loaded.experiment_class(loaded.config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An experiment, its state and its workdir, after 4 epochs of digits."""
    experiment = make("digits", **TINY)
    workdir = tmp_path_factory.mktemp("trained")
    return experiment, haikutrain.train(experiment, workdir), workdir


def test_it_learns_digits_in_four_epochs(trained, log_lines):
    _, state, workdir = trained
    (line,) = log_lines(workdir, "test")
    assert int(state.step) == line["step"] == 4 * 1437 // 64
    assert line["accuracy"] > 0.9  # Of the averaged weights; by chance it is 0.1.
    assert line["raw_accuracy"] > 0.9
    assert line["loss"] != line["raw_loss"]
    assert line["worst_class_accuracy"] <= line["accuracy"]
    assert (workdir / "media/test-confusion-89.png").exists()


def test_a_resumed_run_is_the_straight_one(trained, tmp_path, log_lines):
    _, _, workdir = trained

    def start(folder, stop):
        state = haikutrain.train(make("digits", **TINY, stop_after=stop), tmp_path / folder)
        return haikutrain.digest(state), log_lines(tmp_path / folder)

    start("stopped", 3)
    assert start("stopped", 6) == (straight := start("straight", 6))
    assert straight[1] == log_lines(workdir)[:3]


def test_one_device_evaluates_as_four_did(trained, main, log_lines):
    _, _, workdir = trained
    main(
        f"--config={FILE}:digits",
        f"--workdir={workdir}",
        "--cpu_devices=1",
        "--mode=eval",
        *flags(TINY),
    )
    (four,) = log_lines(workdir, "test")
    one = json.loads((workdir / "metrics_eval.jsonl").read_text())
    assert one.pop("split") == four.pop("split") == "test"
    assert one == pytest.approx(four, rel=1e-4)


def test_cross_replica_is_the_batchnorm_of_all_devices():
    arrays = make("digits").arrays("test")
    batch = {name: array[:8] for name, array in arrays.items()}

    def losses(cross_replica, device_count):
        experiment = make("digits", width=4, crop_padding=0, cross_replica=cross_replica)
        network = hk.transform_with_state(lambda batch: experiment.loss(batch, True)[0])
        split = jax.tree.map(lambda a: a.reshape(device_count, -1, *a.shape[1:]), batch)
        run = jax.vmap(network.apply, (None, None, None, 0), axis_name=haikutrain.AXIS)
        return jax.jit(run)(*variables, jax.random.key(1), split)[0].ravel()

    experiment = make("digits", width=4)
    network = hk.transform_with_state(lambda batch: experiment.loss(batch, True)[0])
    variables = jax.jit(network.init)(jax.random.key(0), batch)
    whole = losses(True, 1)
    np.testing.assert_allclose(losses(True, 4), whole, rtol=1e-4)
    assert not np.allclose(losses(False, 4), whole, rtol=1e-2)


def run_loss(experiment, batch, is_training):
    """The losses, and the network's input, of a network that always says `LOGITS`."""
    seen = []
    experiment.network = lambda x, is_training: seen.append(x) or jnp.tile(LOGITS, (len(x), 1))
    function = hk.transform(lambda: experiment.loss(batch, is_training)[0])
    return function.apply({}, jax.random.key(0)), np.asarray(seen[0])


LOGITS = np.where(np.arange(10) == 3, 2.0, 0.0)
MEAN, STD = np.array([125.3, 123.0, 113.9]), np.array([63.0, 62.1, 66.7])


def test_training_crops_flips_and_smooths_and_evaluation_does_not():
    image = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), np.uint8)
    batch, plain = {"image": image, "label": np.full(64, 3)}, (image - MEAN) / STD
    losses, seen = run_loss(make(label_smoothing=0.2), batch, is_training=False)
    right, wrong = np.log(np.exp(2) + 9) - 2, np.log(np.exp(2) + 9)
    np.testing.assert_allclose(losses, right, rtol=1e-5)
    np.testing.assert_allclose(seen, plain, atol=1e-5)

    losses, seen = run_loss(make(label_smoothing=0.2), batch, is_training=True)
    np.testing.assert_allclose(losses, 0.82 * right + 0.18 * wrong, rtol=1e-5)
    # A corner is black unless the window is shifted inwards both ways: 5 of 9 places each.
    corners = seen[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    black = np.isclose(corners, -MEAN / STD, atol=1e-5).all(-1)
    assert black.mean() == pytest.approx(1 - (5 / 9) ** 2, abs=0.1)

    _, seen = run_loss(make(crop_padding=0), batch, is_training=True)
    same = [np.allclose(a, b, atol=1e-5) for a, b in zip(seen, plain, strict=True)]
    mirrored = [np.allclose(a, b[:, ::-1], atol=1e-5) for a, b in zip(seen, plain, strict=True)]
    assert np.mean(same) == pytest.approx(0.5, abs=0.2)
    assert np.add(same, mirrored).tolist() == [1] * 64


def test_decay_leaves_norms_and_biases_and_the_first_step_is_nesterovs():
    experiment = make(weight_decay=0.5, learning_rate=2.0, warmup_epochs=0)
    params = {"logits": {"w": jnp.array([4.0]), "b": jnp.array([4.0])}, "norm": {"scale": 4.0}}
    optimizer = experiment.optimizer()
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params, step=0)
    # With u = g + 0.5 p, the first update is -rate * (u + 0.9 u).
    assert float(updates["logits"]["w"][0]) == pytest.approx(-2.0 * 1.9 * 3.0)
    assert float(updates["logits"]["b"][0]) == pytest.approx(-2.0 * 1.9)
    assert float(updates["norm"]["scale"]) == pytest.approx(-2.0 * 1.9)


def test_the_schedule_counts_epochs_whatever_is_overridden():
    c = make(batch_size=500, num_epochs=10, learning_rate=1.0).config
    assert (c.num_steps, c.eval_every, c.checkpoint_every) == (1000, 500, 500)
    rates = make(batch_size=500, num_epochs=10, learning_rate=1.0, warmup_epochs=5)
    optimizer = rates.optimizer()
    params = {"w": jnp.ones(1)}
    for step, expected in ((0, 0.0), (250, 0.5), (500, 1.0), (750, 0.5), (1000, 0.0)):
        _, state = optimizer.update(params, optimizer.init(params), params, step=jnp.int32(step))
        assert float(state[-1].learning_rate) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("variant", "depth", "parameters"),
    [("cifar10", 18, 11_173_962), ("cifar10", 50, 23_520_842), ("cifar100", 18, 11_220_132)],
)
def test_the_networks_are_those_that_are_known_by_these_names(variant, depth, parameters):
    experiment = make(variant, depth=depth)
    network = hk.transform_with_state(lambda x: experiment.network(x, is_training=True))
    params, _ = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((2, 32, 32, 3)))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameters


def test_the_real_files_are_read(tmp_path):
    rng = np.random.default_rng(0)
    labels, pixels = rng.integers(0, 10, (6, 3, 1)), rng.integers(0, 256, (6, 3, 3072))
    records = np.concatenate([labels, pixels], axis=2).astype(np.uint8)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name, content in zip(names, records, strict=True):
        (tmp_path / "cifar-10-batches-bin" / name).write_bytes(content.tobytes())
    experiment = make(data_dir=tmp_path)
    train, test = experiment.arrays("train"), experiment.arrays("test")
    np.testing.assert_array_equal(train["label"], labels[:5].reshape(15))
    assert (train["image"].shape, train["image"].dtype) == ((15, 32, 32, 3), np.uint8)
    np.testing.assert_array_equal(test["image"][2, :, :, 1].ravel(), pixels[5, 2, 1024:2048])
    assert experiment.eval_data()["test"].num_examples == 3


@pytest.mark.parametrize("variant", ["cifar10", "cifar100"])
def test_without_files_it_says_which_and_from_where(variant, tmp_path, capsys, check_refused):
    from haikutrain import main

    code = main.run(
        [f"--config={FILE}:{variant}", f"--workdir={tmp_path}/w", *flags({"data_dir": tmp_path})]
    )
    wanted = {"cifar10": ("data_batch_1.bin", "test_batch.bin"), "cifar100": ("train.bin",)}
    archive = f"kriz/{variant.replace('r1', 'r-1')}-binary.tar.gz"
    check_refused((code, *capsys.readouterr()), str(tmp_path), archive, *wanted[variant])


def test_the_report_is_the_confusion_matrix():
    rows = {"label": np.array([0] * 4 + [1] * 6), "predicted": np.array([0, 0, 0, 1] + [1] * 6)}
    experiment = make("digits")
    experiment.config.classes = 2
    report = experiment.report(None, "test", rows)
    assert report["worst_class_accuracy"] == 0.75
    np.testing.assert_allclose(report["confusion"][::8, ::8], [[0.75, 0.25], [0.0, 1.0]])
