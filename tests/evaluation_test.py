"""Evaluation is exact: each example counts once, on any number of devices."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haikutrain
from haikutrain.errors import UsageError
from haikutrain.evaluation import evaluate_splits
from haikutrain.start import Task


@pytest.fixture(scope="module")
def fixed(configs):
    """The module `configs/evaluation.py`."""
    spec = importlib.util.spec_from_file_location("evaluation", configs / "evaluation.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def evaluated(fixed, **methods):
    """What evaluation on 4 devices returns, with these methods in place of the experiment's."""
    task = Task(type("Changed", (fixed.Fixed,), methods)(fixed.get_config()))
    return scalars(task, task.programs.init())


def scalars(task, state):
    return {split: result.scalars for split, result in evaluate_splits(task, state).items()}


def check_exact(fixed, results):
    assert set(results) == set(fixed.SPLITS)
    for split, examples in fixed.SPLITS.items():
        assert results[split] == pytest.approx(fixed.expected(examples), rel=1e-6), split


def test_every_split_is_numpys_mean_on_4_devices(fixed):
    results = evaluated(fixed)
    check_exact(fixed, results)
    assert {type(v) for values in results.values() for v in values.values()} == {float}


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_every_split_is_numpys_mean_on_other_numbers_of_devices(
    fixed, configs, main, tmp_path, devices
):
    main(
        f"--config={configs / 'evaluation.py'}",
        f"--workdir={tmp_path}",
        f"--cpu_devices={devices}",
    )
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    results = {line.pop("split"): line for line in lines if line.pop("step") == 1}
    results.pop("train", None)
    check_exact(fixed, results)


def test_padding_is_never_part_of_it(fixed):
    """Metrics that are NaN on whatever the framework may have padded with."""
    seen = []

    def evaluate(self, state, batch, rngs):
        # In a batch of 4 devices x 1 row, all rows behind the second equal the first.
        rows = jax.lax.all_gather(batch["x"], haikutrain.AXIS, tiled=True)
        place = jax.lax.axis_index(haikutrain.AXIS)
        repeats = (rows[:1] == batch["x"]).all() & (place > 0)
        seen.append(rows.shape)
        return {"x": jnp.where(repeats, jnp.nan, batch["x"][:, 0])}

    results = evaluated(
        fixed,
        evaluate=evaluate,
        eval_data=lambda self: haikutrain.ArrayDataset(fixed.arrays(10), 4),
    )
    assert seen == [(4, 3)]
    assert results["eval"]["x"] == pytest.approx(fixed.arrays(10)["x"][:, 0].mean(), rel=1e-6)


def test_nan_in_a_real_row_is_told(fixed):
    x = fixed.arrays(10)["x"]
    x[9, 0] = np.nan
    results = evaluated(fixed, eval_data=lambda self: haikutrain.ArrayDataset({"x": x}, 4))
    assert np.isnan(results["eval"]["loss"])
    assert results["eval"]["positive"] == pytest.approx((x[:, 0] > 0).mean())


def batch_mean(self, state, batch, rngs):
    return {"mean": (batch["x"] ** 2).mean(), "first": batch["x"][:, 0]}


def test_a_batchs_mean_is_exact_over_full_batches(fixed):
    arrays = fixed.arrays(24)
    for size in (4, 8, 24):
        results = evaluated(
            fixed,
            evaluate=batch_mean,
            eval_data=lambda self, size=size: haikutrain.ArrayDataset(arrays, size),
        )
        expected = {"mean": (arrays["x"] ** 2).mean(), "first": arrays["x"][:, 0].mean()}
        assert results["eval"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("examples, size", [(10, 4), (8, 6), (3, 16)])
def test_a_batchs_mean_is_refused_over_padded_ones(fixed, examples, size):
    with pytest.raises(UsageError, match=r"'eval': \['mean'\] are means of a batch.*an example"):
        evaluated(
            fixed,
            evaluate=batch_mean,
            eval_data=lambda self: haikutrain.ArrayDataset(fixed.arrays(examples), size),
        )


@pytest.mark.parametrize(
    "metrics, words",
    [
        ({"x": jnp.zeros((3, 2))}, ["'x'", "[3, 2]", "one value an example"]),
        ([1.0], ["returned a list", "dict of metrics"]),
    ],
)
def test_what_cannot_be_averaged_is_refused(fixed, metrics, words):
    with pytest.raises(UsageError, match=r"Changed\.evaluate") as caught:
        evaluated(fixed, evaluate=lambda self, state, batch, rngs: metrics)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_split_cannot_be_called_train(fixed):
    with pytest.raises(UsageError, match="split named 'train'"):
        evaluated(fixed, eval_data=lambda self: {"train": [fixed.arrays(4)]})


def test_without_eval_data_there_is_nothing_to_evaluate(fixed):
    assert evaluated(fixed, eval_data=lambda self: {}) == {}


def test_keys_are_the_same_in_every_evaluation_and_differ_by_row_and_batch(fixed):
    def evaluate(self, state, batch, rngs):
        return {"draw": jax.random.normal(next(rngs), batch["x"].shape[:1])}

    experiment = type("Changed", (fixed.Fixed,), {"evaluate": evaluate})(fixed.get_config())
    experiment.eval_data = lambda: [fixed.arrays(8)] * 3
    task = Task(experiment)
    state = task.programs.init()
    before = jax.tree.map(np.array, state)
    first = scalars(task, state)
    (feed,) = task.eval_feeds.values()
    sums = {float(task.programs.evaluate(state, "eval", i)["sums"]["draw"]) for i in feed.items()}
    assert len(sums) == 3
    assert scalars(task, state) == first
    # And the state, its key too, is what it was.
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.tree.map(np.array, state)))
