"""The character model: its figure, its exactness, its samples; float16's scale through a resume."""

import collections
import itertools
import math
import pathlib
import random

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haikutrain
from haikutrain import config_file, leaves

FILE = pathlib.Path(__file__).parents[1] / "experiments" / "char_lm.py"
TINY = {"context": 16, "width": 16, "layers": 2, "heads": 2, "batch_size": 8, "sample_length": 20}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """703 characters: 632 for training, 71 held out, which are 4 windows of 16 and 7 more."""
    rng = random.Random(0)
    words = " ".join(rng.choice(["an", "bee", "can", "do"]) for _ in range(300))
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(words[:703])
    return path


def flags(changes):
    return [f"--config.{name}={value}" for name, value in changes.items()]


def make(variant="", **changes):
    loaded = config_file.load(f"{FILE}{variant}", flags(changes))
    return loaded.experiment_class(loaded.config)


@pytest.fixture(scope="module")
def tiny(text_file):
    """Makes the experiment small, on the words."""
    return lambda variant="", **changes: make(
        variant, **{**TINY, "text_file": text_file, **changes}
    )


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """An experiment and its state and workdir after 12 steps."""
    experiment = tiny(num_steps=12, eval_every=6, log_every=6, **{"optimizer.warmup_steps": 2})
    workdir = tmp_path_factory.mktemp("trained")
    return experiment, haikutrain.train(experiment, workdir), workdir


def logits_of(experiment, params, codes):
    """By hand: what the network says after each of `codes` [T]."""
    transformer = config_file.load(str(FILE)).experiment_class.loss.__globals__["Transformer"]
    size = len(experiment.alphabet)
    network = hk.transform(lambda x: transformer(experiment.config, size)(x, False))
    return np.asarray(network.apply(params, None, jnp.asarray(codes)[None])[0], np.float64)


# --- that it learns --------------------------------------------------------------------------


def pair_bits(training, held_out):
    """Bits a character of a model of pairs of characters: counts, with 0.1 added to each."""
    pairs = collections.Counter(itertools.pairwise(training))
    firsts = collections.Counter(training[:-1])
    size = len({*training, *held_out})
    after = itertools.pairwise(held_out)
    bits = [-math.log2((pairs[a, b] + 0.1) / (firsts[a] + 0.1 * size)) for a, b in after]
    return sum(bits) / len(bits)


def test_it_beats_a_model_of_pairs_of_characters(tmp_path, log_lines):
    experiment = make(
        num_steps=200, width=48, layers=1, context=32, dropout=0.0,
        **{"optimizer.learning_rate": 1e-2},
    )  # fmt: skip
    haikutrain.train(experiment, tmp_path)
    (line,) = log_lines(tmp_path, "eval")
    wanted = pair_bits(experiment.training, experiment.held_out)
    assert 3 < wanted < 3.5
    assert line["bits_per_character"] < wanted
    assert len((tmp_path / "media/eval-sample-200.txt").read_text()) == 256


# --- that the figure is what it says ---------------------------------------------------------


def test_each_held_out_character_counts_once(trained, log_lines):
    experiment, state, workdir = trained
    codes = experiment.codes(experiment.held_out)
    assert len(codes) == 72  # With the one before.
    bits = []
    for begin in (0, 16, 32, 48, 55):  # The last window is full, and 9 of it were counted before.
        logits = logits_of(experiment, state.params, codes[begin : begin + 16])
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        each = -logp[np.arange(16), codes[begin + 1 : begin + 17]] / np.log(2)
        bits.extend(each[9:] if begin == 55 else each)
    assert len(bits) == 71
    line = log_lines(workdir, "eval")[-1]
    assert line["bits_per_character"] == pytest.approx(np.mean(bits), abs=1e-5)
    assert line["loss"] == pytest.approx(np.mean(bits) * np.log(2), abs=1e-5)


def test_no_held_out_character_is_trained_on(tiny, text_file):
    experiment = tiny()
    text, data = text_file.read_text(), experiment.train_data()
    assert experiment.training + experiment.held_out[1:] == text
    assert experiment.training[-1] == experiment.held_out[0]
    assert len(experiment.training) == 632
    seen = [data.batch(step) for step in range(300)]
    windows = {tuple(row) for b in seen for row in np.c_[b["input"], b["target"][:, -1]].tolist()}
    codes = experiment.codes(experiment.training).tolist()
    # Of 616 places each is met in 2400 draws but for about 616 * exp(-2400 / 616) = 13 of them.
    assert windows <= {tuple(codes[i : i + 17]) for i in range(616)}
    assert len(windows) > 450
    for batch in seen[:3]:
        np.testing.assert_array_equal(batch["input"][:, 1:], batch["target"][:, :-1])
        assert (batch["weight"] == 1).all()


def test_a_batch_is_a_function_of_its_step(tiny):
    one, other = tiny().train_data(), tiny().train_data()
    whole = one.batch(7)
    for rows in (slice(0, 4), slice(4, 8), slice(2, 3)):
        part = other.batch(7, rows)
        jax.tree.map(lambda p, w, r=rows: np.testing.assert_array_equal(p, w[r]), part, whole)
    assert (whole["input"] != one.batch(8)["input"]).any()
    assert (whole["input"] != tiny(seed=1).train_data().batch(7)["input"]).any()


def test_a_character_does_not_see_what_comes_after_it(trained):
    experiment, state, _ = trained
    codes = experiment.codes(experiment.training[:16])
    changed = codes.copy()
    changed[10] = (codes[10] + 1) % len(experiment.alphabet)
    before, after = (logits_of(experiment, state.params, c) for c in (codes, changed))
    np.testing.assert_array_equal(before[:10], after[:10])
    assert (np.abs(before[10:] - after[10:]).max(-1) > 1e-4).all()


def test_only_matrices_decay(tiny, trained):
    _, state, _ = trained
    changes = {"learning_rate": 0.5, "schedule": "constant", "warmup_steps": 0}
    experiment = tiny(**{f"optimizer.{name}": value for name, value in changes.items()})
    optimizer = experiment.optimizer()
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    moved, _ = optimizer.update(zeros, optimizer.init(zeros), state.params, step=state.step)
    params = leaves.leaf_table(state.params)
    for path, change in leaves.leaf_table(moved).items():
        decay = 0.5 * 0.1 if path.endswith("/w") else 0.0
        np.testing.assert_allclose(change, -decay * params[path], rtol=1e-6, err_msg=path)
    assert {path.rpartition("/")[2] for path in params} == {
        "w", "b", "scale", "offset", "embeddings", "positions",
    }  # fmt: skip


def test_the_default_text_has_each_paragraph_once():
    experiment = make()
    paragraphs = (experiment.training + experiment.held_out[1:]).split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) > 1000


# --- samples ---------------------------------------------------------------------------------


def test_samples_are_what_the_network_says_one_character_at_a_time(trained):
    experiment, state, workdir = trained
    assert int(state.step) == 12
    key = jax.random.fold_in(jax.random.key(0), 12)
    window, written = list(experiment.codes(experiment.held_out[:16])), []
    for one in jax.random.split(key, 20):
        logits = logits_of(experiment, state.params, window[-16:])[-1]
        window.append(int(jax.random.categorical(one, jnp.asarray(logits, jnp.float32))))
        written.append(experiment.alphabet[window[-1]])
    text = experiment.report(state, "eval", {})["sample"]
    assert text == "".join(written)
    assert (workdir / "media/eval-sample-12.txt").read_text() == text
    assert experiment.report(state, "eval", {})["sample"] == text
    later = state.replace(step=state.step + 1)
    assert experiment.report(later, "eval", {})["sample"] != text


# --- float16, resume, devices ----------------------------------------------------------------

RESUMED = {
    "num_steps": 8, "log_every": 4, "eval_every": 4, "checkpoint_every": 4, "keep_checkpoints": 8,
    "batch_size": 16, "accumulate_steps": 2, "dropout": 0.2, "optimizer.warmup_steps": 2,
}  # fmt: skip


def overflowing(experiment):
    """The same experiment, with a loss at step 1 that is too large for float16 gradients."""
    owner = type(experiment)

    def loss(self, batch, is_training):
        losses, metrics = owner.loss(self, batch, is_training)
        blow = jnp.where(haikutrain.step() == 1, 1e6, 1.0) if is_training else 1.0
        return losses * blow, metrics

    made = type(owner.__name__, (owner,), {"loss": loss, "__module__": owner.__module__})
    return made(experiment.config)


def test_a_resumed_float16_run_goes_on_with_the_scale_it_had(tiny, tmp_path, log_lines):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    experiment = overflowing(tiny(":float16", **RESUMED))
    state = haikutrain.train(experiment, straight)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    haikutrain.train(overflowing(tiny(":float16", stop_after=5, **RESUMED)), resumed)
    again = haikutrain.train(overflowing(tiny(":float16", **RESUMED)), resumed)
    assert haikutrain.digest(again) == haikutrain.digest(state)
    for split in ("train", "eval"):
        assert log_lines(resumed, split) == log_lines(straight, split)
        assert [line["step"] for line in log_lines(resumed, split)] == [4, 8]
    samples = [(path / "media/eval-sample-8.txt").read_text() for path in (straight, resumed)]
    assert samples[0] == samples[1]
    # At first it is 2**15. The overflow halves it, and the count of good steps begins again.
    for step in (4, 5, 8):
        scale = haikutrain.restore(experiment, resumed, step).extras["loss_scale"]
        assert (float(scale["scale"]), int(scale["good_steps"])) == (2.0**14, step - 2)
    assert log_lines(resumed)[0]["loss_scale"] == 2.0**14


def test_half_precision_trains_as_float32_does(tiny, drive):
    losses = {}
    for variant in ("", ":bfloat16", ":float16"):
        experiment = tiny(variant, num_steps=6, layers=1, **{"optimizer.warmup_steps": 1})
        losses[variant] = np.array([step["loss"] for step in drive(experiment, 6)[1]])
    assert losses[""][-1] < losses[""][0] - 0.1
    # The digits after the point that the two formats have: 8 and 11 bits.
    assert 0 < np.abs(losses[":bfloat16"] - losses[""]).max() < 3e-2
    assert 0 < np.abs(losses[":float16"] - losses[""]).max() < 4e-3


def test_one_device_trains_as_four_do(tiny, text_file, main, tmp_path, log_lines):
    changes = {
        **TINY, "num_steps": 8, "log_every": 1, "eval_every": 4, "dropout": 0.0,
        "optimizer.warmup_steps": 2, "text_file": text_file,
    }  # fmt: skip
    workdirs = tmp_path / "one", tmp_path / "four"
    main(f"--config={FILE}", f"--workdir={workdirs[0]}", "--cpu_devices=1", *flags(changes))
    haikutrain.train(tiny(**changes), workdirs[1])
    for split, name, count in (("train", "loss", 8), ("eval", "bits_per_character", 2)):
        one, four = ([line[name] for line in log_lines(path, split)] for path in workdirs)
        assert len(one) == count
        np.testing.assert_allclose(one, four, atol=1e-5)
    texts = [(path / "media/eval-sample-8.txt").read_text() for path in workdirs]
    assert texts[0] == texts[1]


def test_mistakes_in_the_text_are_said(tiny, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    for name, said in {
        "none": r"text_file='.*none' cannot be read: .*No such file",
        "binary": r"text_file='.*binary' cannot be read: 'utf-8' codec",
        "short.txt": r"the text has 9 characters.*context=16",
    }.items():
        with pytest.raises(haikutrain.UsageError, match=said):
            tiny(text_file=tmp_path / name)
