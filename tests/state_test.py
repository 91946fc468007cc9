"""TrainState: a value that is threaded through every step, and saved and restored whole."""

import copy
import dataclasses
import itertools
import math
import shutil

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haikutrain

DEVICES = 4
ROWS = 16


def arrays(examples=40):
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, examples)
    x = rng.normal(size=(examples, 5)) * [1, 2, 3, 4, 5] + 10 * label[:, None]
    return {"x": x.astype(np.float32), "label": label}


def ramp(shape, dtype):
    """Initial weights that compile in no time."""
    return jnp.linspace(-0.1, 0.1, math.prod(shape), dtype=dtype).reshape(shape)


class Norm(haikutrain.Experiment):
    """BatchNorm on the data themselves: its averages can be worked out by hand."""

    def loss(self, batch, is_training):
        axis = haikutrain.AXIS if self.config.cross_replica else None
        norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis, name="norm")
        logits = hk.Linear(3, w_init=ramp)(norm(batch["x"], is_training))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {"accuracy": logits.argmax(-1) == batch["label"]}

    def optimizer(self):
        return optax.sgd(self.config.learning_rate)

    def train_data(self):
        return haikutrain.ArrayDataset(arrays(), ROWS, seed=0)


def config(**changes):
    result = haikutrain.base_config()
    result.update(experiment="here:Norm", num_steps=3, batch_size=ROWS, log_every=1)
    result.update(cross_replica=False, learning_rate=0.1, net="whole", optimizer="sgd")
    result.update(changes)
    return result


# --- threaded --------------------------------------------------------------------------------


@pytest.mark.parametrize("per_call, parts", [(1, 1), (5, 1), (1, 2), (5, 4)])
def test_counters_count_the_updates_on_every_device(tmp_path, per_call, parts):
    changes = {"num_steps": 10, "steps_per_call": per_call, "accumulate_steps": parts}
    changes |= {"log_every": 10, "checkpoint_every": 10}
    state = haikutrain.train(Norm(config(**changes)), tmp_path)
    for average in ("mean_ema", "var_ema"):
        counter = state.network_state[f"norm/~/{average}"]["counter"]
        assert [int(shard.data) for shard in counter.addressable_shards] == [10 * parts] * DEVICES


def averages_by_hand(steps, groups, parts):
    """BatchNorm's averages over `groups` devices with statistics of their own, in float64."""
    hidden = {"mean": np.zeros((groups, 5)), "var": np.zeros((groups, 5))}
    dataset = haikutrain.ArrayDataset(arrays(), ROWS, seed=0)
    for step in range(steps):
        x = dataset.batch(step)["x"].astype(np.float64)
        # Each device passes its rows in `parts` parts, one after the other.
        shares = x.reshape(DEVICES, parts, -1, 5).swapaxes(0, 1)
        for part in shares.reshape(parts, groups, -1, 5):
            hidden["mean"] = 0.9 * hidden["mean"] + 0.1 * part.mean(axis=1)
            hidden["var"] = 0.9 * hidden["var"] + 0.1 * part.var(axis=1)
    debias = 1 - 0.9 ** (steps * parts)
    return {name: value.mean(axis=0) / debias for name, value in hidden.items()}


@pytest.mark.parametrize("cross_replica, parts", [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_moving_averages_equal_numpys(drive, cross_replica, parts):
    task = Norm(config(cross_replica=cross_replica, accumulate_steps=parts))
    state = drive(task, steps=4)[0][4]
    expected = averages_by_hand(4, groups=1 if cross_replica else DEVICES, parts=parts)
    for name, value in expected.items():
        got = state.network_state[f"norm/~/{name}_ema"]["average"]
        np.testing.assert_allclose(got[0], value, rtol=1e-4)
    # The two differ, so that one cannot pass for the other.
    other = averages_by_hand(4, groups=DEVICES if cross_replica else 1, parts=parts)
    assert np.max(np.abs(other["var"] / expected["var"] - 1)) > 0.05


def test_cross_replica_statistics_on_four_devices_are_those_of_the_whole_batch_on_one(drive):
    """Against Haiku and optax alone, on one device."""
    task = Norm(config(cross_replica=True))
    states, metrics = drive(task, steps=5)
    alone = Norm(config(cross_replica=False))
    network = hk.transform_with_state(lambda batch: alone.loss(batch, True)[0].mean())
    state, optimizer = jax.device_get(states[0]), task.optimizer()
    params, network_state, opt_state = state.params, state.network_state, state.opt_state
    grad = jax.jit(jax.value_and_grad(network.apply, has_aux=True))
    for step in range(5):
        batch = task.train_data().batch(step)
        (loss, network_state), grads = grad(params, network_state, None, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        assert metrics[step]["loss"] == pytest.approx(float(loss), abs=1e-5)
    for got, wanted in ((states[5].params, params), (states[5].network_state, network_state)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted
        )


class Digits(Norm):
    """Far from zero mean and unit variance, so that averages that do not move are useless."""

    def loss(self, batch, is_training):
        x = hk.Linear(32, with_bias=False)(hk.Flatten()(batch["image"]) * 20 + 5)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
        logits = hk.Linear(10)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {"accuracy": logits.argmax(-1) == batch["label"]}

    def train_data(self):
        return haikutrain.ArrayDataset(haikutrain.digits("train"), 128, seed=0)

    def eval_data(self):
        return {"seen": haikutrain.ArrayDataset(haikutrain.digits("train"), 256)}


def test_evaluation_with_the_averages_reaches_the_training_accuracy(tmp_path, log_lines):
    changes = {"num_steps": 120, "batch_size": 128, "log_every": 20, "learning_rate": 0.5}
    haikutrain.train(Digits(config(**changes)), tmp_path)
    in_training = log_lines(tmp_path)[-1]["accuracy"]
    (evaluated,) = log_lines(tmp_path, "seen")
    assert in_training > 0.97
    assert evaluated["accuracy"] > in_training - 0.01


# --- saved and restored ----------------------------------------------------------------------


def by_layer(params):
    return {name: "a" if "linear" in name else "b" for name in params}


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),  # Its state has no arrays.
    "adam": lambda: optax.adam(0.1),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(optax.linear_schedule(0.1, 0.0, 10))
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "masked": lambda: optax.masked(
        optax.adam(0.1), lambda params: {name: "linear" in name for name in params}
    ),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 10)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, by_layer
    ),
    "set_to_zero": optax.set_to_zero,
}


class Various(Norm):
    """A network by `config.net` and an optimizer by `config.optimizer`."""

    def loss(self, batch, is_training):
        if self.config.net == "whole":
            return super().loss(batch, is_training)
        if self.config.net == "stateless":
            return jnp.square(hk.Linear(1, w_init=ramp)(batch["x"] / 30)[:, 0] - batch["label"]), {}
        # "frozen": a module with state and without parameters.
        x = hk.BatchNorm(False, False, 0.9, name="norm")(batch["x"], is_training)
        w = hk.get_parameter("w", [5], init=jnp.zeros) if self.config.net == "frozen" else 1.0
        return jnp.square((x * w).sum(axis=1) - batch["label"]), {}

    def optimizer(self):
        return OPTIMIZERS[self.config.optimizer]()


@pytest.mark.parametrize(
    "net, optimizer",
    [("whole", name) for name in OPTIMIZERS]
    + [("stateless", "adam"), ("stateless", "sgd"), ("frozen", "adam"), ("without params", "adam")],
)
def test_one_more_update_after_a_restore_is_the_uninterrupted_one(tmp_path, net, optimizer):
    # 3 is in the middle of an accumulation of MultiSteps: update 4 applies it.
    task = Various(config(net=net, optimizer=optimizer, num_steps=4, checkpoint_every=3))
    straight = haikutrain.train(task, tmp_path)
    assert int(straight.step) == 4
    middle = haikutrain.restore(task, tmp_path, checkpoint=3)
    assert int(middle.step) == 3
    assert jax.tree.structure(middle) == jax.tree.structure(straight)
    moves = optimizer != "set_to_zero" and net != "without params"
    assert (haikutrain.digest(middle.params) != haikutrain.digest(straight.params)) == moves
    assert (not jax.tree.leaves(straight.network_state)) == (net == "stateless")
    assert (not jax.tree.leaves(straight.opt_state)) == (optimizer in ("sgd", "set_to_zero"))
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    resumed = haikutrain.train(task, tmp_path)
    assert haikutrain.digest(resumed) == haikutrain.digest(straight)
    assert jax.tree.structure(resumed) == jax.tree.structure(straight)


# --- a state of one's own --------------------------------------------------------------------


class ByolState(haikutrain.TrainState):
    target_params: hk.Params
    queue: jax.Array


class Byol(Norm):
    """A target network that begins as the online one and follows it, and a queue of batch means."""

    def init(self, rngs, batch):
        state = super().init(rngs, batch)
        # The very arrays of `params`: as buffers they must not be donated twice.
        return ByolState.extend(state, target_params=state.params, queue=jnp.zeros((2, 5)))

    def update(self, state, batch, rngs):
        grads, network_state, metrics = self.gradients(state, batch, rngs)
        mean = haikutrain.pmean(batch["x"].mean(axis=0))
        queue = jnp.concatenate([state.queue[1:], mean[None]])
        state, metrics = haikutrain.apply_gradients(
            state, grads, network_state=network_state, optimizer=self.optimizer(), metrics=metrics
        )
        target = optax.incremental_update(state.params, state.target_params, 0.25)
        return state.replace(target_params=target, queue=queue), metrics


def test_a_state_of_ones_own_is_trained_saved_and_restored(drive, tmp_path):
    task = Byol(config(checkpoint_every=2))
    states, _ = drive(task, steps=3)
    assert isinstance(states[0], ByolState)
    assert haikutrain.digest(states[0].params) == haikutrain.digest(states[0].target_params)
    for before, after in itertools.pairwise(states):
        expected = jax.tree.map(
            lambda t, p: 0.75 * t + 0.25 * p, before.target_params, after.params
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
            after.target_params,
            expected,
        )
    means = [task.train_data().batch(step)["x"].mean(axis=0) for step in (1, 2)]
    np.testing.assert_allclose(states[3].queue, means, rtol=1e-5)
    straight = haikutrain.train(task, tmp_path)
    assert haikutrain.digest(straight) == haikutrain.digest(states[3])
    shutil.rmtree(tmp_path / "checkpoints" / "3")
    resumed = haikutrain.train(task, tmp_path)
    assert isinstance(resumed, ByolState)
    assert haikutrain.digest(resumed) == haikutrain.digest(straight)


def test_a_subclass_is_a_frozen_dataclass_and_a_pytree_by_itself():
    state = ByolState(
        params={"a": 1}, network_state={}, opt_state=(), target_params={"a": 2}, queue=3
    )
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]
    ]
    assert paths == ["params/a", "target_params/a", "queue"]
    doubled = jax.tree.map(lambda x: 2 * x, state)
    assert (doubled.params, doubled.target_params, doubled.queue) == ({"a": 2}, {"a": 4}, 6)
    assert state.replace(queue=9).queue == 9
    assert copy.deepcopy(state) == state
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.queue = 4
    with pytest.raises(TypeError, match="positional"):
        ByolState({}, {}, ())
    with pytest.raises(TypeError, match="target_params"):
        ByolState(params={}, network_state={}, opt_state=())
