"""What evaluation gives beyond means: rows in order, reports, predictions, raw weights."""

import json

import haiku as hk
import jax
import numpy as np
import optax
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import haikutrain

EXAMPLES = 22  # With batches of 8 on 4 devices: the last batch has 6 rows.


class Reporting(haikutrain.Experiment):
    """Keeps ids and predictions; reports a confusion matrix, its trace, and a word."""

    def loss(self, batch, is_training):
        logits = hk.Linear(3)(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        kept = {
            "id": haikutrain.Rows(batch["id"]),
            "logits": haikutrain.Rows(logits),
            "label": haikutrain.Rows(batch["label"]),
        }
        return losses, {"accuracy": logits.argmax(-1) == batch["label"], **kept}

    def optimizer(self):
        return optax.sgd(0.5)

    def arrays(self):
        rng = np.random.default_rng(0)
        label = rng.integers(0, 3, EXAMPLES)
        x = np.eye(3, dtype=np.float32)[label] + rng.normal(size=(EXAMPLES, 3)).astype(np.float32)
        return {"x": x, "label": label, "id": np.arange(EXAMPLES)}

    def train_data(self):
        return haikutrain.ArrayDataset(self.arrays(), 8, seed=0)

    def eval_data(self):
        return haikutrain.ArrayDataset(self.arrays(), 8)

    def report(self, state, split, rows):
        matrix = np.zeros((3, 3))
        np.add.at(matrix, (rows["label"], rows["logits"].argmax(-1)), 1)
        weights = np.asarray(state.params["linear"]["w"])
        return {
            "correct": np.trace(matrix),
            "confusion": matrix / matrix.max(),
            "text": f"{split}: {weights.shape}",
        }


def config(**changes):
    made = haikutrain.base_config()
    made.num_steps, made.batch_size, made.log_every = 12, 8, 4
    made.update(changes)
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    made = config(ema_decay=0.5, eval_raw=True, best_metric="correct", eval_every=6)
    state = haikutrain.train(Reporting(made), workdir)
    return workdir, made, state


def test_rows_are_each_example_once_in_order(run, tmp_path):
    workdir, made, state = run
    haikutrain.evaluate(Reporting(made), workdir, predictions=tmp_path / "out.npz")
    saved = np.load(tmp_path / "out.npz")
    np.testing.assert_array_equal(saved["eval/id"], np.arange(EXAMPLES))
    arrays = Reporting(made).arrays()
    average = state.extras["ema"]["params"]["linear"]
    logits = arrays["x"] @ np.asarray(average["w"]) + np.asarray(average["b"])
    np.testing.assert_allclose(saved["eval/logits"], logits, atol=1e-5)
    raw = arrays["x"] @ np.asarray(state.params["linear"]["w"])
    raw += np.asarray(state.params["linear"]["b"])
    np.testing.assert_allclose(saved["eval/raw_logits"], raw, atol=1e-5)


def test_raw_and_averaged_weights_are_evaluated_side_by_side(run):
    workdir, made, _ = run
    metrics = haikutrain.evaluate(Reporting(made), workdir)["eval"]
    assert {"accuracy", "raw_accuracy", "loss", "raw_loss", "correct"} == set(metrics)
    assert metrics["loss"] != metrics["raw_loss"]
    assert metrics["correct"] == pytest.approx(metrics["accuracy"] * EXAMPLES)


def test_reports_reach_the_log_the_files_and_tensorboard(run):
    workdir, _, _ = run
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "correct" in line] == [6, 12]
    assert (workdir / "media/eval-text-12.txt").read_text() == "eval: (3, 3)"
    assert (workdir / "media/eval-confusion-6.png").read_bytes().startswith(b"\x89PNG")
    shown = EventAccumulator(str(workdir / "tensorboard"), size_guidance={"images": 0}).Reload()
    image = shown.Images("eval/confusion")[-1]
    assert (image.step, image.width, image.height) == (12, 3, 3)
    text = shown.Tensors("eval/text/text_summary")[-1]
    assert text.tensor_proto.string_val == [b"eval: (3, 3)"]


def test_the_best_checkpoint_may_be_judged_by_a_report(run):
    workdir, made, _ = run
    assert haikutrain.evaluate(Reporting(made), workdir, "best")["eval"]["correct"] >= 7


def test_rows_cost_training_nothing(run):
    _, _, state = run
    made = config(ema_decay=0.5)
    jaxpr = jax.make_jaxpr(
        lambda state, batch: Reporting(made).gradients(state, batch, hk.PRNGSequence(0)),
    )(state, {name: array[:8] for name, array in Reporting(made).arrays().items()})
    shapes = [tuple(v.aval.shape) for v in jaxpr.jaxpr.outvars]
    assert (8,) not in shapes
    assert (8, 3) not in shapes


def test_mistakes_in_what_is_kept_or_reported_are_said(run, tmp_path):
    workdir, made, _ = run

    class Ragged(Reporting):
        def evaluate(self, state, batch, rngs):
            return {"all": haikutrain.Rows(batch["x"].T)}

    class Twice(Reporting):
        def report(self, state, split, rows):
            return {"loss": 1.0}

    class Nothing(Reporting):
        def evaluate(self, state, batch, rngs):
            return {"one": batch["x"][:, 0]}

        def report(self, state, split, rows):
            return {"what": None}

    plain = config()
    with pytest.raises(haikutrain.UsageError, match=r"Rows 'all' has shape \[3, 2\]"):
        haikutrain.evaluate(Ragged(plain), tmp_path)
    with pytest.raises(haikutrain.UsageError, match="no predictions to write"):
        haikutrain.evaluate(Nothing(plain), tmp_path, predictions=tmp_path / "x.npz")
    with pytest.raises(haikutrain.UsageError, match=r"eval_raw=True would do nothing: Nothing"):
        haikutrain.evaluate(Nothing(made), workdir)
    with pytest.raises(haikutrain.UsageError, match="'loss', which is a metric of evaluation"):
        haikutrain.train(Twice(plain), tmp_path / "twice")
    with pytest.raises(haikutrain.UsageError, match="'what' as a NoneType"):
        haikutrain.train(Nothing(plain), tmp_path / "nothing")
    with pytest.raises(haikutrain.UsageError, match=r"best_metric='fame' is not .* eval/accuracy"):
        haikutrain.train(Reporting(config(best_metric="fame")), tmp_path / "fame")


KEPT = """
import haiku as hk
import numpy as np
import optax

import haikutrain


def get_config():
    config = haikutrain.base_config()
    config.experiment = ":Kept"
    config.num_steps, config.batch_size = 3, 8
    return config


class Kept(haikutrain.Experiment):
    def loss(self, batch, is_training):
        logits = hk.Linear(2)(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["id"] % 2)
        return losses, {"id": haikutrain.Rows(batch["id"]), "logits": haikutrain.Rows(logits)}

    def optimizer(self):
        return optax.sgd(0.1)

    def arrays(self):
        x = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
        return {"x": x, "id": np.arange(11)}

    def train_data(self):
        return haikutrain.ArrayDataset(self.arrays(), 8, seed=0)

    def eval_data(self):
        return {"a": haikutrain.ArrayDataset(self.arrays(), 4)}
"""


def test_predictions_are_the_same_on_any_number_of_devices(main, tmp_path):
    (tmp_path / "kept.py").write_text(KEPT)
    flags = [f"--config={tmp_path / 'kept.py'}", f"--workdir={tmp_path / 'run'}"]
    main(*flags, "--cpu_devices=2")
    saved = {}
    for count in (1, 2, 8):
        path = tmp_path / f"{count}.npz"
        main(*flags, "--mode=eval", f"--predictions={path}", f"--cpu_devices={count}")
        saved[count] = dict(np.load(path))
        np.testing.assert_array_equal(saved[count]["a/id"], np.arange(11))
        np.testing.assert_allclose(saved[count]["a/logits"], saved[1]["a/logits"], atol=1e-6)
    assert set(saved[8]) == {"a/id", "a/logits"}
