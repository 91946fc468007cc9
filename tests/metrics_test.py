"""Means that are exact: over ragged batches and over the steps of a log window."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from haikutrain import nonfinite
from haikutrain.metrics import Mean, Window, accumulate, empty_window, masked_sums


def test_sums_are_over_the_real_rows_alone():
    mask = jnp.array([True, True, False, True])
    values = {
        "rows": jnp.array([1.0, 2.0, 100.0, 4.0]),
        "hits": jnp.array([True, False, True, True]),
        "mean": jnp.float32(5),
        "half": jnp.array([0.5, 0.5, 0.5, 0.5], jnp.bfloat16),
    }
    sums = masked_sums(values, mask)
    assert {name: float(value) for name, value in sums.items()} == {
        "rows": 7.0,
        "hits": 2.0,
        "mean": 15.0,  # A batch's mean counts for each of its rows.
        "half": 1.5,
    }
    assert {value.dtype for value in sums.values()} == {jnp.dtype("float32")}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_stands_in_padding_is_ignored(poison):
    mask = jnp.array([True, False])
    assert float(masked_sums({"x": jnp.array([3.0, poison])}, mask)["x"]) == 3.0
    assert float(masked_sums({"x": jnp.array([3.0, poison])}, ~mask & False)["x"]) == 0.0
    # In a real row it is the truth.
    assert not math.isfinite(float(masked_sums({"x": jnp.array([poison, 3.0])}, mask)["x"]))


def test_the_mean_of_ragged_batches_is_numpys():
    values = np.random.default_rng(0).normal(size=10)
    mean = Mean()
    for start in range(0, 10, 4):
        part = values[start : start + 4]
        mean.add({"x": np.float64(part.sum()), "square": (part**2).sum()}, len(part))
    result = mean.result()
    assert result == pytest.approx({"x": values.mean(), "square": (values**2).mean()}, rel=1e-14)
    assert {type(value) for value in result.values()} == {float}


def test_a_mean_of_many_batches_keeps_its_digits():
    # In float32 a sum of 2**24 stops growing by ones.
    mean = Mean()
    mean.add({"x": np.float32(2**24)}, 1)
    for _ in range(4):
        mean.add({"x": np.float32(1)}, 1)
    assert mean.result()["x"] * 5 == 2**24 + 4


def test_the_mean_of_no_rows_is_nan():
    mean = Mean()
    mean.add({"x": 0.0}, 0)
    assert math.isnan(mean.result()["x"])


GOOD = nonfinite.find({"loss": jnp.float32(1)})
BAD = nonfinite.find({"loss": jnp.float32(math.nan)})


def window_after(steps, names=("grad_norm", "learning_rate", "loss"), found=GOOD, mode="stop"):
    window = Window(names, jnp.asarray(empty_window(names)), nonfinite.Judge(mode, 9, []))
    for values in steps:
        values = dict(zip(names, values, strict=True))
        window.sums = accumulate(window.sums, values, found, skips=mode == "skip")
        window.count += 1
    return window


def test_a_window_holds_means_and_the_last_learning_rate():
    window = window_after([(1.0, 0.5, 2), (2.0, 0.25, 4), (6.0, 0.125, 6)])
    means = window.means(*window.close(), 3)
    assert means == {"grad_norm": 3.0, "learning_rate": 0.125, "loss": 4.0}
    assert {type(value) for value in means.values()} == {float}


def test_what_was_skipped_is_not_in_the_means_and_is_counted():
    window = window_after([(1.0, 0.5, 2), (2.0, 0.25, 4)], mode="skip")
    values = {"grad_norm": math.inf, "learning_rate": 0.1, "loss": math.nan}
    window.sums = accumulate(window.sums, values, BAD, skips=True)
    window.count += 1
    means = window.means(*window.close(), 3)
    assert means == {"grad_norm": 1.5, "learning_rate": 0.25, "loss": 3.0, "skipped": 1.0}


def test_closing_opens_an_empty_window():
    window = window_after([(1.0, 0.5, 2.0)])
    sums, count = window.close()
    assert (np.asarray(sums)[:3].tolist(), count) == ([1.0, 0.5, 2.0], 1)
    assert (np.asarray(window.sums).tolist(), window.count) == ([0.0] * 12, 0)
    assert window.close()[1] == 0


def test_accumulate_counts_in_float32_whatever_it_is_given():
    values = {"a": jnp.bfloat16(0.5), "b": jnp.int32(3)}
    window = accumulate(jnp.asarray(empty_window("ab")), values, GOOD, skips=False)
    assert window.dtype == jnp.float32
    assert window[:2].tolist() == [0.5, 3.0]


def test_an_update_without_metrics_has_an_empty_window():
    window = window_after([()], names=())
    assert window.means(*window.close(), 1) == {}


def test_an_open_window_goes_through_json_bit_for_bit():
    values = np.array([0.1, 1e-45, -0.0, math.nan, math.inf, -math.inf, 3.4e38], np.float32)
    names = tuple("abcdefg")
    window = Window(names, jnp.zeros(7, jnp.float32), nonfinite.Judge("stop", 9, []))
    window.sums, window.count = jnp.asarray(values), 3
    saved = json.loads(json.dumps(window.to_json()))
    assert (saved["names"], saved["count"]) == (list(names), 3)
    back = np.array(saved["sums"], np.float32)
    assert back.tobytes() == values.tobytes()
