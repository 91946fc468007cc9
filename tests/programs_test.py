"""Keys differ where they must; nothing drifts; each function is traced and compiled once."""

import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import haikutrain
from haikutrain.eval_feed import EvalFeed
from haikutrain.feed import TrainFeed
from haikutrain.programs import Programs

DEVICES = 4


class Small(haikutrain.Experiment):
    """Rows with an `id` and three numbers; a subclass says what to do with them."""

    def optimizer(self):
        return haikutrain.scale_by_learning_rate(0.1)

    def train_data(self):
        x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
        arrays = {"x": x, "id": np.arange(24)}
        return haikutrain.ArrayDataset(arrays, self.config.batch_size, seed=self.config.seed)


def config(**changes):
    result = haikutrain.base_config()
    result.update(experiment="here:Small", num_steps=4, batch_size=8, log_every=1)
    result.update(changes)
    return result


def by_device(leaf):
    """What each device holds, as bytes."""
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return [np.asarray(shard.data).tobytes() for shard in data.addressable_shards]


# --- keys ------------------------------------------------------------------------------------


class Masks(Small):
    """Keeps the dropout mask that each device drew, for each part of the batch."""

    def loss(self, batch, is_training):
        w = hk.get_parameter("w", [], init=jnp.ones)
        mask = hk.dropout(hk.next_rng_key(), 0.5, jnp.ones(64)) > 0
        parts = self.config.accumulate_steps
        masks = hk.get_state("masks", [parts, DEVICES, 64], jnp.bool_, init=jnp.zeros)
        part = hk.get_state("part", [], jnp.int32, init=jnp.zeros)
        hk.set_state("masks", masks.at[part % parts].set(lax.all_gather(mask, haikutrain.AXIS)))
        hk.set_state("part", part + 1)
        return w * batch["x"].sum(axis=1), {}


@pytest.mark.parametrize("parts, masks", [(1, 8), (2, 16)])
def test_dropout_differs_on_every_device_at_every_step_and_in_every_part(drive, parts, masks):
    states, _ = drive(Masks(config(accumulate_steps=parts)), steps=2)
    found = {
        mask.tobytes()
        for state in states[1:]
        for mask in np.asarray(state.network_state["~"]["masks"]).reshape(-1, 64)
    }
    assert len(found) == masks
    two_in_one, _ = drive(Masks(config(accumulate_steps=parts)), steps=2, per_call=2)
    assert haikutrain.digest(two_in_one[1]) == haikutrain.digest(states[2])


class Evaluated(Masks):
    """Evaluation draws a number for each row, and shows each row's as a metric of its own."""

    def evaluate(self, state, batch, rngs):
        drawn = jax.random.uniform(next(rngs), batch["id"].shape)
        return {str(i): jnp.where(batch["id"] == i, drawn, 0.0) for i in range(16)}


def test_evaluation_draws_other_numbers_for_each_device_and_batch_and_the_same_each_time():
    task = Evaluated(config())
    programs = Programs(task, task.train_data().batch(0))
    state = programs.init()
    before = haikutrain.digest(state)
    rows = {"x": np.zeros((16, 3), np.float32), "id": np.arange(16)}
    feed = EvalFeed(haikutrain.ArrayDataset(rows, 8), "test", 8)
    drawn = []
    for _ in range(2):
        sums = [programs.evaluate(state, "test", item)["sums"] for item in feed.items()]
        drawn.append([float(sums[i // 8][str(i)]) for i in range(16)])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 16
    assert haikutrain.digest(state) == before


class Looking(Small):
    """Its parameters begin at the mean of the rows that init was shown."""

    def loss(self, batch, is_training):
        w = hk.get_parameter("w", [3], init=lambda shape, dtype: batch["x"].mean(axis=0))
        drawn = hk.get_parameter("drawn", [3], init=hk.initializers.RandomNormal())
        return (batch["x"] * (w + drawn)).sum(axis=1), {}


def test_an_init_that_looks_at_data_gives_all_devices_what_the_first_one_saw():
    task = Looking(config())
    first = task.train_data().batch(0)
    programs = Programs(task, first)
    # As the program leaves it, before the state is placed.
    params = programs._init(programs._seed, programs._first).params["~"]
    np.testing.assert_allclose(params["w"], first["x"][:2].mean(axis=0), rtol=1e-6)
    for leaf in params.values():
        assert len(by_device(leaf)) == DEVICES
        assert len(set(by_device(leaf))) == 1
    feed = TrainFeed(task.train_data(), 8)  # The batch that init saw is not consumed.
    with feed.items([(0, 1)], None) as items:
        np.testing.assert_array_equal(next(items).batch["id"].ravel(), first["id"])


class Drawing(Small):
    """Draws `config.draws` keys a step."""

    def loss(self, batch, is_training):
        w = hk.get_parameter("w", [3], init=jnp.zeros)
        for _ in range(self.config.draws):
            hk.next_rng_key()
        place = lax.axis_index(haikutrain.AXIS) * 2 + jnp.arange(2)
        return (batch["x"] * w).sum(axis=1), {"ids": batch["id"] * (place + 1)}


def test_drawing_more_keys_moves_neither_the_data_nor_the_next_key(drive):
    runs = [drive(Drawing(config(draws=draws, seed=5)), steps=4) for draws in (0, 1, 9)]
    key = hk.PRNGSequence(5).take(3)[1]
    for step in range(5):
        for states, _ in runs:
            np.testing.assert_array_equal(states[step].rng, key)
        sequence = hk.PRNGSequence(key)
        sequence.take(1)
        key = sequence.internal_state[0]
    ids = [[values["ids"] for values in metrics] for _, metrics in runs]
    assert ids[0] == ids[1] == ids[2]
    assert len(set(ids[0])) == 4


# --- drift -----------------------------------------------------------------------------------


class Zoo(Small):
    """A state with every kind of leaf, some of them Python numbers when init returns them."""

    def loss(self, batch, is_training):
        w = hk.get_parameter("w", [3], jnp.bfloat16, init=jnp.ones)
        hk.set_state("count", hk.get_state("count", [], jnp.int8, init=jnp.zeros) + 1)
        return (batch["x"] * w).sum(axis=1), {}

    def init(self, rngs, batch):
        state = super().init(rngs, batch)
        zoo = {"int": 1, "float": 2.0, "flag": True, "key": next(rngs), "empty": jnp.zeros((0, 2))}
        zoo["python"] = 7
        zoo["typed"] = jax.random.wrap_key_data(zoo["key"])
        return state.replace(network_state={**state.network_state, "zoo": zoo})

    def update(self, state, batch, rngs):
        zoo = dict(state.network_state["zoo"])
        state, metrics = super().update(state, batch, rngs)
        zoo.update(int=zoo["int"] + 1, float=zoo["float"] * 2, flag=~zoo["flag"], python=7)
        zoo["typed"] = jax.random.fold_in(zoo["typed"], 1)
        return state.replace(network_state={**state.network_state, "zoo": zoo}), metrics


def looks(state):
    return jax.tree.structure(state), [
        (leaf.shape, leaf.dtype, leaf.aval.weak_type) for leaf in jax.tree.leaves(state)
    ]


def test_structure_and_dtypes_are_those_of_init_for_ever(drive, tmp_path):
    states, _ = drive(Zoo(config()), steps=4)
    more, _ = drive(Zoo(config()), steps=4, per_call=2)
    trained = haikutrain.train(Zoo(config()), tmp_path)
    restored = haikutrain.restore(Zoo(config()), tmp_path)
    for state in (*states, *more, trained, restored):
        assert looks(state) == looks(states[0])
    assert not any(weak for _, _, weak in looks(states[0])[1])
    zoo = restored.network_state["zoo"]
    assert (int(zoo["int"]), float(zoo["float"]), bool(zoo["flag"])) == (5, 32.0, True)
    assert haikutrain.digest(restored) == haikutrain.digest(states[4]) == haikutrain.digest(more[2])


class Changing(Masks):
    def update(self, state, batch, rngs):
        state, metrics = super().update(state, batch, rngs)
        part = state.network_state["~"]["part"]
        return state.replace(
            params={"~": {"w": state.params["~"]["w"].astype(jnp.bfloat16)}},
            network_state={"~": {"part": part[None]}},
        ), metrics


def test_an_update_that_changes_the_state_is_refused_with_every_difference(drive):
    with pytest.raises(haikutrain.UsageError) as error:
        drive(Changing(config()), steps=1)
    for difference in (
        "params/~/w was float32[] and is bfloat16[]",
        "network_state/~/masks was bool[1,4,64] and is absent",
        "network_state/~/part was int32[] and is int32[1]",
    ):
        assert difference in str(error.value)


def test_replicas_are_equal_to_the_byte_after_50_steps(tiny, tmp_path):
    changes = {"num_steps": 50, "log_every": 50, "checkpoint_every": 50, "ema_decay": 0.9}
    state = haikutrain.train(tiny.Tiny(tiny_config(tiny, **changes)), tmp_path)
    assert int(state.step) == 50
    for leaf in jax.tree.leaves(state):
        assert len(by_device(leaf)) == DEVICES
        assert len(set(by_device(leaf))) == 1


def tiny_config(tiny, **changes):
    result = tiny.get_config()
    result.update(changes)
    return result


class Forgetful(Drawing):
    """Averages nothing of one module's parameters, and keeps a number of its own."""

    def init(self, rngs, batch):
        state = super().init(rngs, batch)
        params = {**state.params, "other": {"b": jnp.zeros(2)}}
        return state.replace(params=params, network_state={"own": jnp.zeros(())})

    def update(self, state, batch, rngs):
        own = lax.axis_index(haikutrain.AXIS)
        step = state.step + 1
        params = {**state.params, "other": {"b": state.params["other"]["b"] + own}}
        seen = jnp.where(step == 3, batch["x"].sum(), 0.0)
        return state.replace(params=params, network_state={"own": seen}), {"steps": step * 1.0}


def test_a_replica_that_differs_stops_the_run_and_is_named(tmp_path):
    task = Forgetful(config(checkpoint_every=3, draws=0))
    with pytest.raises(haikutrain.ReplicasDiffer) as error:
        haikutrain.train(task, tmp_path)
    step, names = re.match(
        r"at step (\d+) these are not equal on all devices: (.*?);", str(error.value)
    ).groups()
    assert step == "3"
    assert names.split(", ") == ["params/other/b", "network_state/own"]
    assert list(tmp_path.glob("checkpoints/*")) == []


# --- one trace -------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    """Grows by one for every program that is compiled, or fetched from the compilation cache."""
    found = []

    def listen(event, seconds, **details):
        if event.endswith("backend_compile_duration") and details["fun_name"] == "jit(_fun)":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_each_function_is_traced_once_a_start_and_each_form_compiled_once(tiny, tmp_path, compiled):
    calls, compiled_at = [], {}

    class Counting(tiny.Tiny):
        def loss(self, batch, is_training):
            calls.append("loss in training" if is_training else "loss in evaluation")
            return super().loss(batch, is_training)

        def update(self, state, batch, rngs):
            calls.append("update")
            return super().update(state, batch, rngs)

        def hooks(self):
            return [lambda info: compiled_at.update({info.step: len(compiled)})]

    def start(**changes):
        calls.clear()
        compiled.clear()
        compiled_at.clear()
        task = Counting(tiny_config(tiny, num_steps=24, **changes))
        haikutrain.train(task, tmp_path)
        return {name: calls.count(name) for name in sorted(set(calls))}

    # Init and the update each trace the loss; the two splits have batches of two sizes.
    once = {"loss in evaluation": 2, "loss in training": 2, "update": 1}
    periods = {"log_every": 1, "eval_every": 4, "checkpoint_every": 4}
    assert start(stop_after=10, **periods) == once
    assert compiled_at[1] == 2  # Init and the update.
    assert compiled_at[4] == 4  # Two sizes of evaluation batches.
    assert compiled_at[5] <= 5  # The comparison of replicas before a save.
    assert compiled_at[10] == compiled_at[5]
    # From 10 by single steps to 12, then by fours; what compares replicas is there already.
    assert start(steps_per_call=4, **{**periods, "log_every": 4}) == once
    assert list(compiled_at) == [11, 12, 16, 20, 24]
    assert compiled_at[11] == 1
    assert compiled_at[12] == 3
    assert compiled_at[24] == len(compiled) == 4
