"""Taking a part of another run's weights, freezing it, and float16's loss scale."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haikutrain
from haikutrain import updates


class Source(haikutrain.Experiment):
    """An encoder and a head."""

    def loss(self, batch, is_training):
        x = hk.Linear(4, name="encoder")(batch["x"])
        x = hk.BatchNorm(True, True, 0.9, name="norm")(x, is_training)
        y = hk.Linear(1, name="head")(jax.nn.relu(x))[:, 0]
        return (y - batch["y"]) ** 2, {}

    def optimizer(self):
        return optax.adam(1e-2)

    def train_data(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(32, 3)).astype(np.float32)
        return haikutrain.ArrayDataset({"x": x, "y": x.sum(1)}, 8, seed=0)


class Probe(Source):
    """The same encoder by another name, frozen; another head."""

    def loss(self, batch, is_training):
        x = hk.Linear(4, name="backbone")(batch["x"])
        y = hk.Linear(1, name="probe")(jax.nn.relu(x))[:, 0]
        return (y - batch["y"]) ** 2, {}

    def optimizer(self):
        return haikutrain.freeze(optax.adam(1e-2), haikutrain.mask_by_name("backbone/.*"))

    def warm_start(self, state, saved):
        params = haikutrain.take(state.params, saved, {"backbone": "params/encoder"})
        return state.replace(params=params)


def config(**changes):
    made = haikutrain.base_config()
    made.num_steps, made.batch_size, made.log_every = 10, 8, 5
    made.update(changes)
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("source")
    return workdir, haikutrain.train(Source(config()), workdir)


def warm(workdir, **changes):
    return config(restore_from=str(workdir), restore_only="weights", **changes)


def test_a_part_is_taken_under_another_name_and_stays_frozen(source, tmp_path):
    workdir, trained = source
    state = haikutrain.train(Probe(warm(workdir)), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, state.params["backbone"], trained.params["encoder"])
    assert int(state.step) == 10
    # The frozen half has no moments in the optimizer's state.
    paths = haikutrain.leaves.by_path(state.opt_state)
    assert any("probe" in path for path in paths)
    assert not any("backbone" in path for path in paths)


def test_what_cannot_be_taken_is_named_all_at_once(source, tmp_path):
    class Wrong(Probe):
        def warm_start(self, state, saved):
            names = {"backbone/w": "params/head/w", "backbone/b": "params/nose/b", "leg": "params"}
            return state.replace(params=haikutrain.take(state.params, saved, names))

    class Reshaped(Probe):
        def warm_start(self, state, saved):
            return state.replace(params={**state.params, "probe": {"w": jnp.zeros((4, 2))}})

    with pytest.raises(haikutrain.UsageError) as error:
        haikutrain.train(Wrong(warm(source[0])), tmp_path / "wrong")
    for part in ("backbone/w is float32[3,4]", "no params/nose/b", "nothing is called leg"):
        assert part in str(error.value)
    with pytest.raises(haikutrain.UsageError, match="params/probe/w"):
        haikutrain.train(Reshaped(warm(source[0])), tmp_path / "reshaped")
    assert not (tmp_path / "wrong/checkpoints").exists()


def test_without_warm_start_the_weights_must_be_the_same(source, tmp_path):
    class Whole(Probe):
        warm_start = haikutrain.Experiment.warm_start

    with pytest.raises(haikutrain.UsageError, match=r"params/backbone/w .* params/encoder/w"):
        haikutrain.train(Whole(warm(source[0])), tmp_path)


FLOAT16 = "params=float32,compute=float16,output=float32"


class Overflowing(Source):
    """At step 3 the loss is too large for float16 gradients."""

    def loss(self, batch, is_training):
        x = hk.Linear(4, name="encoder")(batch["x"])
        y = hk.Linear(1, name="head")(jax.nn.relu(x))[:, 0]
        blow = jnp.where(haikutrain.step() == 3, 1e6, 1e-2)
        return blow * (y - batch["y"]) ** 2, {}


def test_an_overflow_lowers_the_scale_and_changes_nothing_else(tmp_path):
    states = {}

    class Watching(Overflowing):
        def hooks(self):
            return [lambda info: states.update({info.step: jax.tree.map(np.array, info.state)})]

    haikutrain.train(Watching(config(precision=FLOAT16, num_steps=6)), tmp_path)
    scales = [float(states[step].extras["loss_scale"]["scale"]) for step in range(1, 7)]
    assert scales == [2.0**15] * 3 + [2.0**14] * 3
    for name in ("params", "network_state", "opt_state"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(states[4], name), getattr(states[3], name)
        )
    assert states[4].step == 4
    assert not np.array_equal(states[4].rng, states[3].rng)
    assert not np.array_equal(states[5].params["head"]["w"], states[4].params["head"]["w"])


def test_the_scale_does_not_show_in_the_gradients(tmp_path):
    class Descent(Overflowing):
        def optimizer(self):
            return optax.sgd(1.0)

    changes = {"num_steps": 3, "log_every": 1}
    plain = haikutrain.train(Descent(config(**changes)), tmp_path / "plain")
    half = haikutrain.train(Descent(config(precision=FLOAT16, **changes)), tmp_path / "half")
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(half.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)
    assert half.params["encoder"]["w"].dtype == np.float32


def test_the_scale_doubles_after_2000_good_steps():
    scale = haikutrain.precision.initial_loss_scale(FLOAT16)
    scale = {**scale, "good_steps": jnp.int32(1999)}
    new = haikutrain.precision.adjusted_loss_scale(scale, jnp.array(True))
    assert (float(new["scale"]), int(new["good_steps"])) == (2.0**16, 0)
    assert updates.initial_extras(None, config()) == {}
