"""`docs/without_haiku.md`: its two experiments, of Flax Linen and Flax NNX, trained and resumed."""

import pathlib
import re
import shutil

import numpy as np
import pytest
from jax import lax

import haikutrain
from haikutrain import config_file, leaves

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "without_haiku.md").read_text()
STEPS, MIDDLE = 12, 5

# Where each keeps what: hidden layer, its moving mean and variance, its scale and offset, output.
PATHS = {
    "linen_digits": (
        "params/Dense_0/kernel",
        "network_state/batch_stats/BatchNorm_0/mean",
        "network_state/batch_stats/BatchNorm_0/var",
        "params/BatchNorm_0/scale",
        "params/BatchNorm_0/bias",
        "params/Dense_1/kernel",
        "params/Dense_1/bias",
    ),
    "nnx_digits": (
        "params/hidden/kernel",
        "network_state/norm/mean",
        "network_state/norm/var",
        "params/norm/scale",
        "params/norm/bias",
        "params/out/kernel",
        "params/out/bias",
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The page's experiments as config files."""
    folder = tmp_path_factory.mktemp("page")
    for name, source in zip(PATHS, re.findall(r"```python\n(.*?)```", PAGE, re.S), strict=True):
        assert f"{name}.py" in PAGE
        (folder / f"{name}.py").write_text(source)
    return folder


@pytest.fixture(scope="module", params=list(PATHS))
def make(request, files):
    """Makes one of the two experiments, with some fields changed."""

    def experiment(**changes):
        loaded = config_file.load(str(files / f"{request.param}.py"))
        loaded.config.update(changes)
        return loaded.experiment_class(loaded.config)

    experiment.path = files / f"{request.param}.py"
    experiment.paths = PATHS[request.param]
    return experiment


def changes(**more):
    made = {"num_steps": STEPS, "log_every": 1, "eval_every": 6, "grad_clip_norm": 1.0}
    return {**made, "ema_decay": 0.9, **more}


def forward(make, table, images, running=True):
    """By hand, without dropout: the hidden layer before BatchNorm, and the logits."""
    hidden, mean, var, scale, offset, w, b = (table[path].astype(np.float64) for path in make.paths)
    x = images.reshape(len(images), -1).astype(np.float64) @ hidden
    mean, var = (mean, var) if running else (x.mean(0), x.var(0))
    y = np.maximum((x - mean) / np.sqrt(var + 1e-5) * scale + offset, 0)
    return x, y @ w + b


def assert_evaluated(make, state, line):
    """The line is NumPy's own evaluation of a state, with the moving averages."""
    test = haikutrain.digits("test")
    _, logits = forward(make, leaves.leaf_table(state), test["image"])
    accuracy = (logits.argmax(-1) == test["label"]).mean()
    assert line["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert line["loss"] == pytest.approx(-logp[np.arange(360), test["label"]].mean(), abs=1e-5)


def test_it_learns_and_its_evaluation_is_numpys(make, tmp_path, log_lines):
    state = haikutrain.train(make(num_steps=150), tmp_path)
    (line,) = log_lines(tmp_path, "eval")
    assert_evaluated(make, state, line)
    assert line["accuracy"] > 0.94


def test_the_moving_averages_are_those_of_the_whole_batch(make, drive):
    experiment = make(dropout=0.0, batch_size=32)
    before, after = map(leaves.leaf_table, drive(experiment, 1)[0])
    batch = experiment.train_data().batch(0)
    x, _ = forward(make, before, batch["image"], running=False)
    _, mean, var, *_ = make.paths
    np.testing.assert_allclose(after[mean], 0.1 * x.mean(0), atol=1e-5)
    np.testing.assert_allclose(after[var], 0.9 + 0.1 * x.var(0), atol=1e-5)


def test_dropout_differs_on_every_device_and_step(make, drive, monkeypatch):
    real = haikutrain.apply_gradients

    def apply_gradients(state, grads, *, metrics, **others):
        each = lax.all_gather(metrics["loss"], haikutrain.AXIS)
        state, values = real(state, grads, metrics=metrics, **others)
        return state, {**values, **{f"loss_{i}": each[i] for i in range(4)}}

    monkeypatch.setattr(haikutrain, "apply_gradients", apply_gradients)

    def losses(dropout):
        """On 4 devices with the same 4 examples each, for 2 steps in which nothing is learnt."""
        experiment = make(dropout=dropout, learning_rate=0.0, batch_size=16)
        four = {name: array[:4] for name, array in haikutrain.digits("train").items()}
        same = {name: np.concatenate([array] * 8) for name, array in four.items()}
        experiment.train_data = lambda: haikutrain.ArrayDataset(same, 16)
        _, metrics = drive(experiment, 2)
        return [step[f"loss_{i}"] for step in metrics for i in range(4)]

    assert len(set(losses(0.5))) == 8
    np.testing.assert_allclose(losses(0.0), losses(0.0)[0], rtol=1e-6)


def test_a_resumed_run_is_the_straight_one_bit_for_bit(make, tmp_path, log_lines):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    state = haikutrain.train(make(**changes()), straight)
    haikutrain.train(make(**changes(stop_after=MIDDLE)), resumed)
    again = haikutrain.train(make(**changes()), resumed)
    assert haikutrain.digest(again) == haikutrain.digest(state)
    for split, count in {"train": STEPS, "eval": 2}.items():
        assert log_lines(resumed, split) == log_lines(straight, split)
        assert len(log_lines(resumed, split)) == count
    saved = haikutrain.restore(make(**changes()), resumed, STEPS)
    assert set(make.paths) <= set(leaves.leaf_table(saved))
    assert_evaluated(make, haikutrain.averaged(saved), log_lines(resumed, "eval")[-1])


def test_one_device_goes_on_as_four_do(make, main, tmp_path, log_lines):
    straight, resumed = tmp_path / "four", tmp_path / "one"
    haikutrain.train(make(**changes(dropout=0.0, checkpoint_every=MIDDLE)), straight)
    shutil.copytree(straight, resumed)
    for step in (10, STEPS):
        shutil.rmtree(resumed / "checkpoints" / str(step))
    flags = [f"--config.{name}={value}" for name, value in changes(dropout=0.0).items()]
    main(f"--config={make.path}", f"--workdir={resumed}", "--cpu_devices=1", *flags)
    for split, count in {"train": STEPS, "eval": 2}.items():
        one, four = (log_lines(path, split) for path in (resumed, straight))
        assert [line["step"] for line in one] == [line["step"] for line in four]
        assert len(one) == count
        for name in ("loss", "accuracy"):
            values = [[line[name] for line in lines] for lines in (one, four)]
            np.testing.assert_allclose(*values, atol=1e-5)
        assert one[-1]["loss"] < one[0]["loss"]


def test_settings_that_would_do_nothing_are_refused(make, tmp_path):
    half = "params=float32,compute=bfloat16,output=float32"
    for field, value in {"accumulate_steps": 2, "precision": half}.items():
        with pytest.raises(haikutrain.UsageError, match=rf"config.{field}=.* would do nothing"):
            haikutrain.train(make(**{field: value}), tmp_path / field)
