"""Datasets: which example stands where, and what is refused."""

import itertools
import random

import jax
import ml_dtypes
import numpy as np
import pytest

import haikutrain
from haikutrain.data import count_rows, describe
from haikutrain.errors import UsageError


def ids(examples, **kwargs):
    """A dataset whose only array is the number of each example."""
    return haikutrain.ArrayDataset({"id": np.arange(examples)}, **kwargs)


def by_hand(examples, batch_size, seed, step):
    """The ids of batch `step`: from the endless row of shuffled epochs."""
    epochs = 2 + (step + 1) * batch_size // examples
    endless = np.concatenate(
        [np.random.default_rng([seed, epoch]).permutation(examples) for epoch in range(epochs)]
    )
    return endless[step * batch_size : (step + 1) * batch_size]


# Batches that end with the epoch, that straddle two epochs, that hold several whole ones.
SIZES = pytest.mark.parametrize(
    "examples, size", [(12, 4), (10, 4), (7, 5), (3, 8), (1, 4), (5, 5)]
)


@SIZES
def test_the_order_is_the_one_computed_by_hand(examples, size):
    dataset = ids(examples, batch_size=size, seed=7)
    for step in range(9):
        expected = by_hand(examples, size, 7, step)
        np.testing.assert_array_equal(dataset.batch(step)["id"], expected)


@SIZES
def test_every_example_once_an_epoch_and_nothing_dropped(examples, size):
    dataset = ids(examples, batch_size=size, seed=0)
    # As many batches as there are examples are `size` whole epochs.
    seen = np.concatenate([dataset.batch(step)["id"] for step in range(examples)])
    for epoch in seen.reshape(size, examples):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(examples))


def test_each_epoch_and_each_seed_has_another_order():
    orders = {
        tuple(ids(50, batch_size=50, seed=seed).batch(epoch)["id"].tolist())
        for seed in (0, 1, 2**32 - 1)
        for epoch in range(5)
    }
    assert len(orders) == 15
    assert tuple(range(50)) not in orders


@SIZES
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_rows_of_all_processes_are_the_global_batch(examples, size, processes):
    edges = np.linspace(0, size, processes + 1).astype(int)
    for seed in (3, None):
        whole = ids(examples, batch_size=size, seed=seed)
        steps = range(6) if seed is not None else range(len(whole))
        for step in steps:
            parts = [
                ids(examples, batch_size=size, seed=seed).batch(step, slice(*pair))["id"]
                for pair in itertools.pairwise(edges)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), whole.batch(step)["id"])


@SIZES
def test_stacked_batches_are_the_batches(examples, size):
    dataset = ids(examples, batch_size=size, seed=4)
    for step, count in ((0, 1), (0, 9), (3, 5), (7, 16)):
        for rows in (slice(None), slice(0, size // 2), slice(size // 2, size)):
            stacked = dataset.stacked(step, count, rows)["id"]
            wanted = [by_hand(examples, size, 4, step + i)[rows] for i in range(count)]
            np.testing.assert_array_equal(stacked, np.stack(wanted))


def test_an_unshuffled_dataset_stacks_nothing():
    with pytest.raises(ValueError, match="shuffled"):
        ids(10, batch_size=4).stacked(0, 2)


def test_no_rows_are_a_batch_too():
    for seed in (0, None):
        for begin in (0, 2, 4):
            assert (
                len(
                    ids(4, batch_size=4, seed=seed).batch(
                        1 if seed == 0 else 0, slice(begin, begin)
                    )["id"]
                )
                == 0
            )


def test_a_batch_is_a_function_of_its_step_alone():
    dataset = ids(11, batch_size=4, seed=5)
    straight = [dataset.batch(step)["id"] for step in range(30)]
    order = list(range(30)) * 3
    random.Random(0).shuffle(order)
    for step in order:
        np.testing.assert_array_equal(dataset.batch(step)["id"], straight[step])


def test_all_arrays_of_a_batch_show_the_same_examples():
    arrays = {"x": np.arange(20.0).reshape(10, 2), "deep": (np.arange(10), np.arange(10) % 2 == 0)}
    for seed in (0, None):
        batch = haikutrain.ArrayDataset(arrays, 4, seed=seed).batch(1)
        index = batch["deep"][0]
        np.testing.assert_array_equal(batch["x"], np.stack([2.0 * index, 2.0 * index + 1], axis=1))
        np.testing.assert_array_equal(batch["deep"][1], index % 2 == 0)


@pytest.mark.parametrize(
    "examples, size, lengths", [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 8, [3])]
)
def test_without_a_seed_it_is_in_order_and_once(examples, size, lengths):
    dataset = ids(examples, batch_size=size)
    assert len(dataset) == len(lengths)
    batches = [dataset.batch(step)["id"] for step in range(len(dataset))]
    assert [len(batch) for batch in batches] == lengths
    np.testing.assert_array_equal(np.concatenate(batches), np.arange(examples))
    # A process whose rows lie behind the ragged end has none.
    assert len(dataset.batch(len(dataset) - 1, slice(lengths[-1], None))["id"]) == 0


def test_a_shuffled_dataset_has_no_length():
    with pytest.raises(TypeError, match="no end"):
        len(ids(10, batch_size=4, seed=0))


# --- the arrays ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, kept",
    [
        ("float64", "float32"),
        ("int64", "int32"),
        ("uint64", "uint32"),
        ("complex128", "complex64"),
        ("float16", "float16"),
        ("uint8", "uint8"),
        ("bool", "bool"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
    ],
)
def test_arrays_are_narrowed_once_to_what_jax_holds(given, kept):
    array = np.arange(6).astype(given)
    dataset = haikutrain.ArrayDataset(array, 4, seed=0)
    first, second = dataset.batch(0), dataset.batch(1)
    assert first.dtype == second.dtype == np.dtype(getattr(ml_dtypes, kept, kept))
    assert jax.device_put(first).dtype == first.dtype  # Nothing is left to convert.


def test_jax_arrays_and_non_contiguous_ones_are_arrays_too():
    transposed = np.arange(6).reshape(2, 3).T
    dataset = haikutrain.ArrayDataset({"a": jax.numpy.arange(3), "b": transposed}, 2)
    np.testing.assert_array_equal(dataset.batch(1)["a"], [2])
    np.testing.assert_array_equal(dataset.batch(0)["b"], [[0, 3], [1, 4]])


@pytest.mark.parametrize(
    "arrays, words",
    [
        ({"name": np.array(["a", "b"])}, ["'name'", "<U1", "numeric"]),
        ({"a": {"b": np.array([None, 1])}}, ["'a/b'", "object"]),
        ({"when": np.zeros(2, "M8[D]")}, ["'when'", "datetime64"]),
        ({"record": np.zeros(2, [("x", "f4")])}, ["'record'"]),
        ({"x": np.zeros(3), "y": np.zeros(4)}, ["equal leading size", "'x': 3", "'y': 4"]),
        ({"x": np.zeros((0, 2))}, ["leading size > 0", "'x': 0"]),
        ({}, ["leading size"]),
        ({"x": np.float32(1)}, ["'x'", "shape ()", "one row an example"]),
        ({"id": np.array([1, 2**31])}, ["'id'", "too large for int32"]),
        ({"id": np.array([2**32], np.uint64)}, ["'id'", "too large for uint32"]),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[0],
)
def test_arrays_that_cannot_be_batches_are_named(arrays, words):
    with pytest.raises(UsageError) as caught:
        haikutrain.ArrayDataset(arrays, 2)
    assert all(word in str(caught.value) for word in ("ArrayDataset", *words)), caught.value


@pytest.mark.parametrize("size", [0, -4])
def test_a_batch_has_at_least_one_row(size):
    with pytest.raises(UsageError, match=f"batch_size is {size}"):
        ids(10, batch_size=size)


@pytest.mark.parametrize("seed", [0, None])
def test_writing_into_a_batch_changes_no_other(seed):
    mine = np.arange(8, dtype=np.int32)
    dataset = haikutrain.ArrayDataset(mine, 4, seed=seed)
    before = [dataset.batch(step).copy() for step in range(2)]
    for step in range(2):
        batch = dataset.batch(step)
        if batch.flags.writeable:
            batch += 100
    for step in range(2):
        np.testing.assert_array_equal(dataset.batch(step), before[step])
    mine += 0  # The caller's own array stays writeable.


# --- digits, and what describes a batch ---------------------------------------------------------


def test_digits_are_1437_and_360_different_pictures():
    train, test = haikutrain.digits("train"), haikutrain.digits("test")
    for split, rows in ((train, 1437), (test, 360)):
        assert describe(split) == {"image": "float32[8, 8, 1]", "label": "int32[]"}
        assert count_rows(split, "digits") == rows
        assert split["image"].min() == 0
        assert split["image"].max() == 1
        # Every class is there, at about a tenth.
        share = np.bincount(split["label"]) / rows
        assert share.shape == (10,)
        assert share.min() > 0.07
    pictures = np.concatenate([train["image"], test["image"]]).reshape(1797, -1)
    assert len(np.unique(pictures, axis=0)) == 1797


def test_digits_has_two_splits():
    with pytest.raises(UsageError, match=r"'validation'.*'train' or 'test'"):
        haikutrain.digits("validation")


def test_arrays_that_differ_in_rows_are_named():
    with pytest.raises(UsageError, match=r"here gave .*'x': 3, 'y': 2"):
        count_rows({"x": np.zeros(3), "y": np.zeros(2)}, "here")
    with pytest.raises(UsageError, match="'y': 'a scalar'"):
        count_rows({"x": np.zeros(3), "y": np.float32(0)}, "here")
