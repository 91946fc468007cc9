"""How batches reach the devices: the right ones, in time, with the position after them."""

import threading
import traceback

import grain
import jax
import numpy as np
import pytest

import haikutrain
from haikutrain import devices
from haikutrain.errors import UsageError
from haikutrain.eval_feed import EvalFeed
from haikutrain.feed import TrainFeed

DEVICES = 4  # As many as the tests simulate.


def numbered(step, rows=8, width=2):
    """Batch `step`: every number in it is unique."""
    start = step * rows * width
    return {"x": np.arange(start, start + rows * width, dtype=np.float32).reshape(rows, width)}


class ByStep:
    """By step, without end; remembers which thread asked for what."""

    def __init__(self, make=numbered):
        self.make, self.asked = make, []

    def batch(self, step, rows):
        self.asked.append((step, threading.current_thread()))
        return {name: array[rows] for name, array in self.make(step).items()}


class ByIterator:
    """By iterator; its own iterator. `reached(n)` waits until n batches have been drawn."""

    def __init__(self, make=numbered, length=10**9):
        self.make, self.length = make, length
        self.state = {"drawn": 0}
        self.threads = set()
        self._changed = threading.Condition()

    def __iter__(self):
        return self

    def __next__(self):
        self.threads.add(threading.current_thread())
        step = self.state["drawn"]
        if step == self.length:
            raise StopIteration
        batch = self.make(step)
        with self._changed:
            self.state["drawn"] += 1
            self._changed.notify_all()
        return batch

    def reached(self, count):
        with self._changed:
            return self._changed.wait_for(lambda: self.state["drawn"] >= count, timeout=60)

    def get_state(self):
        return self.state  # The very dict that the next batch changes.

    def set_state(self, state):
        self.state = dict(state)


def plan(*strides, start=0):
    for steps in strides:
        yield start, steps
        start += steps


def expected(first, steps):
    batches = [numbered(step)["x"].reshape(DEVICES, 2, 2) for step in range(first, first + steps)]
    return batches[0] if steps == 1 else np.stack(batches)


@pytest.mark.parametrize("protocol", [ByStep, ByIterator])
@pytest.mark.parametrize("strides", [(1, 1, 1, 1), (3, 3), (1, 1, 3, 1)])
def test_items_are_the_batches_on_the_devices(protocol, strides):
    feed = TrainFeed(protocol(), 8)
    with feed.items(plan(*strides), None) as items:
        items = list(items)
    assert [item.steps for item in items] == list(strides)
    for (first, steps), item in zip(plan(*strides), items, strict=True):
        np.testing.assert_array_equal(item.batch["x"], expected(first, steps))
        shards = item.batch["x"].addressable_shards
        assert [shard.device for shard in shards] == jax.local_devices()
        device_axis = int(steps > 1)
        assert {shard.data.shape[device_axis] for shard in shards} == {1}


@pytest.mark.parametrize("protocol", [ByStep, ByIterator])
def test_the_first_batch_is_looked_at_and_not_consumed(protocol):
    feed = TrainFeed(protocol(), 8)
    np.testing.assert_array_equal(feed.first["x"], numbered(0)["x"])
    assert feed.position == (None if protocol is ByStep else {"drawn": 0})
    with feed.items(plan(1), None) as items:
        np.testing.assert_array_equal(next(items).batch["x"], expected(0, 1))


def test_a_dataset_by_step_is_asked_for_its_steps_by_the_training_thread():
    dataset = ByStep()
    feed = TrainFeed(dataset, 8)
    before = threading.enumerate()
    dataset.asked.clear()
    with feed.items(plan(1, 3, 1, start=70), None) as items:
        for item in items:
            assert threading.enumerate() == before
            assert item.position is None
    assert dataset.asked == [(step, threading.current_thread()) for step in range(70, 75)]


def test_one_batch_is_ahead_of_its_step():
    dataset = ByStep()
    feed = TrainFeed(dataset, 8)
    with feed.items(plan(*[1] * 9), None) as items:
        next(items)
        next(items)
        assert [step for step, _ in dataset.asked[1:]] == [0, 1, 2]


# --- iterators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3])
def test_the_position_is_the_one_after_the_items_last_batch(steps):
    dataset = ByIterator()
    feed = TrainFeed(dataset, 8)
    with feed.items(plan(*[steps] * 50), None) as items:
        for number in range(1, 6):
            item = next(items)
            # Two items wait while this one is used.
            assert dataset.reached((number + 2) * steps)
            assert item.position == {"drawn": number * steps}
            np.testing.assert_array_equal(item.batch["x"], expected((number - 1) * steps, steps))
    # And not more than two.
    assert dataset.state["drawn"] == 7 * steps
    assert dataset.threads >= {threading.current_thread()}
    assert len(dataset.threads) == 2


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_goes_on_from_any_position(steps):
    with TrainFeed(ByIterator(), 8).items(plan(*[steps] * 4), None) as items:
        straight = list(items)
    for number, item in enumerate(straight[:-1]):
        feed = TrainFeed(ByIterator(), 8)
        with feed.items(plan(steps, start=(number + 1) * steps), item.position) as items:
            resumed = next(items)
        np.testing.assert_array_equal(resumed.batch["x"], straight[number + 1].batch["x"])
        assert resumed.position == straight[number + 1].position


def broken_at_three(step):
    if step == 3:
        raise OSError("the disk is gone")
    return numbered(step)


def test_an_error_in_the_iterator_is_raised_where_its_item_is_due():
    feed = TrainFeed(ByIterator(broken_at_three), 8)
    with feed.items(plan(*[1] * 9), None) as items:
        for _ in range(3):
            next(items)
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone") as caught:
                next(items)
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "broken_at_three" in names


def test_leaving_the_items_ends_the_thread():
    before = set(threading.enumerate())

    def use(taken):
        feed = TrainFeed(ByIterator(), 8)
        with feed.items(plan(*[1] * 9), None) as items:
            (thread,) = set(threading.enumerate()) - before
            for _ in range(taken):
                next(items)
            if taken == 2:
                raise KeyError("in the loop")
        return thread

    for taken in (0, 1, 9):
        assert not use(taken).is_alive()
    with pytest.raises(KeyError, match="in the loop"):
        use(2)
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("steps", [1, 3])
def test_an_iterator_that_ends_too_early_is_named(steps):
    feed = TrainFeed(ByIterator(length=5), 8)
    with (
        feed.items(plan(*[steps] * 9), None) as items,
        pytest.raises(UsageError, match="train_data ended after 5 batches; make it repeat"),
    ):
        list(items)


@pytest.mark.parametrize("protocol", [ByStep, ByIterator])
@pytest.mark.parametrize(
    "other, words",
    [
        (lambda: numbered(0, rows=4), ["4 rows", "8 of"]),
        (lambda: numbered(0, width=3), ["float32[3]", "float32[2]"]),
        (lambda: {"x": np.zeros((8, 2), np.int8)}, ["int8[2]", "float32[2]"]),
        (lambda: {"y": np.zeros((8, 2), np.float32)}, ["'y'", "'x'"]),
    ],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_batch_that_looks_otherwise_is_named(protocol, other, words, steps):
    feed = TrainFeed(protocol(lambda step: other() if step == 4 else numbered(step)), 8)
    with (
        feed.items(plan(*[steps] * 5), None) as items,
        pytest.raises(UsageError, match="at step 4") as caught,
    ):
        list(items)
    assert all(word in str(caught.value) for word in words), caught.value


def grain_dataset():
    source = [{"x": np.float32([i, -i])} for i in range(30)]
    return grain.MapDataset.source(source).seed(1).shuffle().repeat().batch(8)


@pytest.mark.parametrize(
    "make, protocol",
    [
        (grain_dataset, "by step"),
        (lambda: grain_dataset().to_iter_dataset(), "by iterator"),
    ],
)
def test_grains_own_method_batch_is_not_our_protocol(make, protocol):
    batches = iter(make())
    straight = [next(batches)["x"].reshape(DEVICES, 2, 2) for _ in range(6)]
    feed = TrainFeed(make(), 8)
    with feed.items(plan(1, 1, 1), None) as items:
        for item, batch in zip(items, straight[:3], strict=True):
            np.testing.assert_array_equal(item.batch["x"], batch)
    with TrainFeed(make(), 8).items(plan(3, start=3), item.position) as items:
        np.testing.assert_array_equal(next(items).batch["x"], np.stack(straight[3:]))
    assert feed.fingerprint()["protocol"] == protocol


# --- what is refused, and what is remembered ------------------------------------------------------


@pytest.mark.parametrize(
    "dataset, words",
    [
        (7, ["returned a int", "batch(step, rows)"]),
        ([numbered(0)], ["list_iterator", "no get_state"]),
        ((numbered(i) for i in range(9)), ["generator", "no get_state"]),
        (ByIterator(length=0), ["train_data is empty"]),
        (ByIterator(lambda step: numbered(step, rows=6)), ["6 rows", "batch_size=8"]),
        (ByStep(lambda step: numbered(step, rows=6)), ["6 rows", "batch_size=8"]),
        (haikutrain.ArrayDataset(np.arange(9), 4, seed=0), ["batch_size 4", "the config 8"]),
        (ByStep(lambda step: {"x": np.zeros(8), "y": np.zeros(7)}), ["'x': 8", "'y': 7"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_trained_on_is_refused_at_once(dataset, words):
    with pytest.raises(UsageError) as caught:
        TrainFeed(dataset, 8)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_finite_dataset_must_last():
    feed = TrainFeed(haikutrain.ArrayDataset(np.arange(20), 8), 8)
    feed.check_length(3)
    with pytest.raises(UsageError, match="has 3 batches and the run needs 4"):
        feed.check_length(4)
    TrainFeed(haikutrain.ArrayDataset(np.arange(20), 8, seed=0), 8).check_length(10**6)


def test_the_fingerprint_says_what_a_resume_must_find_again():
    feed = TrainFeed(haikutrain.ArrayDataset({"id": np.arange(20)}, 8, seed=3), 8)
    assert feed.fingerprint() == {
        "protocol": "by step",
        "batch_size": 8,
        "examples": 20,
        "seed": 3,
        "row": {"id": "int32[]"},
    }


# --- evaluation ------------------------------------------------------------------------------


def test_evaluation_batches_are_padded_by_a_row_of_their_own():
    feed = EvalFeed(haikutrain.ArrayDataset(np.arange(1, 11), 8), "test", 16)
    for _ in range(2):  # Each evaluation anew.
        whole, ragged = feed.items()
        np.testing.assert_array_equal(whole.batch, np.arange(1, 9).reshape(4, 2))
        np.testing.assert_array_equal(ragged.batch, [[9, 10], [9, 9], [9, 9], [9, 9]])
        assert (np.asarray(whole.mask).sum(), np.asarray(ragged.mask).sum()) == (8, 2)
        np.testing.assert_array_equal(np.asarray(ragged.mask).ravel()[:2], [True, True])
        assert (whole.padded, ragged.padded) == (False, True)
        assert np.asarray(ragged.index).tolist() == [[1]] * DEVICES


@pytest.mark.parametrize(
    "dataset, words",
    [
        (haikutrain.ArrayDataset(np.arange(9), 4, seed=0), ["no end", "without a seed"]),
        ([], ["is empty"]),
        (iter([numbered(0)]), ["list_iterator", "anew"]),
        ((numbered(i) for i in range(9)), ["generator", "anew"]),
        (ByIterator(length=5), ["ByIterator", "anew"]),
        (7, ["a int", "anew"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value else "",
)
def test_what_cannot_be_evaluated_on_is_refused_at_once(dataset, words):
    with pytest.raises(UsageError, match=r"eval_data \('test'\)") as caught:
        EvalFeed(dataset, "test", 8)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_wrapper_around_a_one_shot_iterator_is_refused():
    class Once:
        batches = iter([numbered(0), numbered(1)])

        def __iter__(self):
            return self.batches

    with pytest.raises(UsageError, match="anew"):
        EvalFeed(Once(), "test", 8)


def test_a_batch_without_rows_is_all_padding():
    feed = EvalFeed([numbered(0), numbered(0, rows=0)], "test", 8)
    _, empty = feed.items()
    assert empty.batch["x"].shape == (DEVICES, 2, 2)
    assert not np.asarray(empty.mask).any()


def test_the_first_evaluation_batch_is_the_largest():
    feed = EvalFeed([numbered(0, rows=4), numbered(0, rows=8)], "test", 8)
    with pytest.raises(UsageError, match="8 rows after one of 4"):
        list(feed.items())


# --- arrays in memory: several batches at once ---------------------------------------------------


def shuffled(examples=21, width=2):
    """Three epochs and a bit are 9 batches of 8: their rows straddle the epochs' ends."""
    array = np.arange(examples * width, dtype=np.float32).reshape(examples, width)
    return haikutrain.ArrayDataset({"x": array}, 8, seed=5)


class Shifted(haikutrain.ArrayDataset):
    """Makes something else of each batch."""

    def batch(self, step, rows=slice(None)):
        return {"x": super().batch(step, rows)["x"] + 1000}


@pytest.mark.parametrize("strides", [(1,) * 40, (1, 1, 4, 4, 1, 4), (4,) * 9])
@pytest.mark.parametrize("start", [0, 13])
@pytest.mark.parametrize("kind", [haikutrain.ArrayDataset, Shifted])
def test_items_of_an_array_dataset_are_its_batches(strides, start, kind):
    dataset = shuffled()
    dataset.__class__ = kind
    with TrainFeed(dataset, 8).items(plan(*strides, start=start), None) as items:
        for (first, steps), item in zip(plan(*strides, start=start), items, strict=True):
            wanted = [dataset.batch(first + i)["x"].reshape(DEVICES, 2, 2) for i in range(steps)]
            found = np.asarray(item.batch["x"])
            np.testing.assert_array_equal(found, wanted[0] if steps == 1 else np.stack(wanted))


def test_small_batches_are_placed_sixteen_at_a_time_and_large_ones_alone(monkeypatch):
    placed = []
    place = devices.place_batch
    monkeypatch.setattr(
        devices, "place_batch", lambda *args, **kwargs: placed.append(1) or place(*args, **kwargs)
    )
    for width, calls in ((2, 4), (1 << 16, 49)):  # 64 bytes, and 2 MiB.
        placed.clear()
        with TrainFeed(shuffled(width=width), 8).items(plan(*[1] * 49, start=15), None) as items:
            assert len([item.placed for item in items]) == 49
        assert len(placed) == calls


def test_a_step_takes_its_own_batch_of_a_group(tiny, drive):
    """The same states as from batches that are placed one by one."""
    config = tiny.get_config()

    class OneByOne(tiny.Tiny):
        def train_data(self):
            dataset = super().train_data()

            class Plain:
                batch_size = dataset.batch_size

                def batch(self, step, rows):
                    return dataset.batch(step, rows)

            return Plain()

    grouped, _ = drive(tiny.Tiny(config), 20)
    alone, _ = drive(OneByOne(config), 20)
    for a, b in zip(grouped, alone, strict=True):
        assert haikutrain.digest(a) == haikutrain.digest(b)


# --- arrays on the devices -----------------------------------------------------------------------


@pytest.mark.parametrize("strides", [(1,) * 40, (1, 1, 4, 4, 1, 4)])
def test_items_of_arrays_on_the_devices_are_the_same_batches(strides):
    arrays = {
        "x": np.arange(42, dtype=np.float32).reshape(21, 2),
        "y": np.arange(21, dtype=np.int8),
    }
    there = haikutrain.ArrayDataset(arrays, 8, seed=5, on_device=True)
    here = haikutrain.ArrayDataset(arrays, 8, seed=5)
    feeds = [
        TrainFeed(dataset, 8).items(plan(*strides, start=13), None) for dataset in (there, here)
    ]
    with feeds[0] as first, feeds[1] as second:
        for a, b in zip(first, second, strict=True):
            # Only int32 numbers of rows cross to the devices.
            assert (a.placed.dtype, a.placed.size % 8) == (np.int32, 0)
            assert set(a.arrays) == {"x", "y"}
            jax.tree.map(np.testing.assert_array_equal, a.batch, b.batch)


@pytest.mark.parametrize("per_call", [1, 5])
def test_arrays_on_the_devices_lead_to_the_same_states(tiny, drive, per_call):
    class There(tiny.Tiny):
        def train_data(self):
            c = self.config
            return haikutrain.ArrayDataset(tiny.arrays(), c.batch_size, seed=c.seed, on_device=True)

    config = tiny.get_config()
    there, _ = drive(There(config), 20, per_call)
    here, _ = drive(tiny.Tiny(config), 20, per_call)
    assert len(there) == 1 + 20 // per_call
    for a, b in zip(there, here, strict=True):
        assert haikutrain.digest(a) == haikutrain.digest(b)


def test_arrays_on_the_devices_need_a_seed():
    with pytest.raises(UsageError, match=r"on_device=True .* needs a seed"):
        haikutrain.ArrayDataset({"x": np.zeros(4)}, 2, on_device=True)
