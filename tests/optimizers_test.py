import math

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

from haikutrain import optimizers, schedules
from haikutrain.errors import UsageError

PARAMS = {
    "net/~/linear": {"w": np.array([[1.0, -2.0], [3.0, 0.5]], np.float32), "b": np.ones(2, "f4")},
    "net/~/norm": {"scale": np.full(2, 2.0, "f4"), "offset": np.full(2, -1.0, "f4")},
}
GRADS = jax.tree.map(lambda p: 0.1 * p + 0.3, PARAMS)
DECAYED = {
    "net/~/linear": {"w": True, "b": False},
    "net/~/norm": {"scale": False, "offset": False},
}


def rate(step):
    return 0.5 / (1.0 + step)


def run(optimizer, num_updates, first_step=0, params=PARAMS):
    """Params and state after updates with GRADS, each handed its step, all under jit."""

    @jax.jit
    def update(params, state, step):
        updates, state = optimizer.update(GRADS, state, params, step=step)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for step in range(first_step, first_step + num_updates):
        params, state = update(params, state, jnp.int32(step))
    return params, state


def config(**changes):
    result = optimizers.optimizer_config()
    result.update(changes)
    return result


@pytest.mark.parametrize("step", [0, 1, 9, 10, 11, 55, 99, 100, 150])
def test_schedules_follow_their_formulas(step):
    peak, end, warmup, num_steps = 0.8, 0.1, 10, 100
    t = min((step - warmup) / (num_steps - warmup), 1.0)
    rise = peak * step / warmup
    cosine = rise if step < warmup else end + (peak - end) * (1 + math.cos(math.pi * t)) / 2
    linear = rise if step < warmup else peak + (end - peak) * t
    constant = peak * min(step / warmup, 1.0)
    for schedule, expected in (
        (schedules.warmup_cosine(peak, num_steps, warmup, end), cosine),
        (schedules.warmup_linear(peak, num_steps, warmup, end), linear),
        (schedules.warmup_constant(peak, warmup), constant),
    ):
        for given in (step, jnp.int32(step)):
            value = schedule(given)
            assert (value.dtype, value.shape, value.weak_type) == (jnp.float32, (), False)
            np.testing.assert_allclose(value, expected, rtol=2e-6, atol=1e-7)


def test_without_warmup_the_first_step_has_the_peak():
    for schedule in (
        schedules.warmup_cosine(0.5, 10),
        schedules.warmup_linear(0.5, 10),
        schedules.warmup_constant(0.5),
    ):
        assert schedule(0) == 0.5


@pytest.mark.parametrize("warmup_steps", [-1, 100, 101])
def test_a_warmup_longer_than_the_run_is_refused(warmup_steps):
    for schedule in (schedules.warmup_cosine, schedules.warmup_linear):
        with pytest.raises(UsageError, match=f"warmup_steps={warmup_steps} with num_steps=100"):
            schedule(0.1, 100, warmup_steps)


def test_updates_are_scaled_by_the_rate_of_the_step_they_are_given():
    optimizer = optimizers.scale_by_learning_rate(rate)
    state = optimizer.init(PARAMS)
    assert state.learning_rate == 0.5
    updates, state = optimizer.update(GRADS, state, PARAMS, step=jnp.int32(4))
    assert state.learning_rate == np.float32(0.1)
    assert (state.learning_rate.dtype, state.learning_rate.weak_type) == (jnp.float32, False)
    chex.assert_trees_all_close(updates, jax.tree.map(lambda g: np.float32(-0.1) * g, GRADS))


def test_it_equals_optax_bit_for_bit_where_no_step_is_skipped():
    ours = optax.chain(optax.scale_by_adam(), optimizers.scale_by_learning_rate(rate))
    chex.assert_trees_all_equal(run(ours, 5)[0], run(optax.adam(rate), 5)[0])


def test_updates_keep_their_dtype_and_the_rate_its_precision():
    optimizer = optimizers.scale_by_learning_rate(1.001e-3)
    grads = {"w": jnp.full(3, 3.0, jnp.bfloat16)}
    updates, _ = optimizer.update(grads, optimizer.init(grads))
    assert updates["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(updates["w"], jnp.bfloat16(-3.003e-3))


def test_a_schedule_without_a_step_is_refused_and_a_number_needs_none():
    optimizer = optax.chain(optax.trace(0.9), optimizers.scale_by_learning_rate(rate))
    with pytest.raises(UsageError, match=r"apply_gradients, or pass step=state\.step"):
        optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)
    optimizer = optimizers.scale_by_learning_rate(0.5)
    updates, _ = optimizer.update(GRADS, optimizer.init(PARAMS))
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda g: -0.5 * g, GRADS))


def wrapped(scale):
    """The scale inside everything that people wrap optimizers in."""
    ours = optax.chain(optax.trace(0.9), scale)
    labels = jax.tree.map(lambda decayed: "body" if decayed else "rest", DECAYED)
    return {
        "plain": scale,
        "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.chain(ours)),
        "named_chain": optax.named_chain(("zz", optax.trace(0.9)), ("aa", scale)),
        "masked": optax.masked(ours, optimizers.decay_mask()),
        "multi_transform": optax.multi_transform(
            {"body": ours, "rest": optax.set_to_zero()}, labels
        ),
        "multi_steps": optax.MultiSteps(ours, 2),
        "multi_steps_as_transformation": optax.MultiSteps(ours, 1).gradient_transformation(),
        "apply_if_finite": optax.apply_if_finite(ours, 3),
        "inside_inject": optax.chain(
            optax.inject_hyperparams(optax.add_decayed_weights)(weight_decay=rate), ours
        ),
        "adaptive_clip": optax.chain(optax.identity(), optax.adaptive_grad_clip(0.1), ours),
    }


@pytest.mark.parametrize("name", wrapped(optax.identity()))
def test_the_rate_is_found_wherever_it_is_wrapped_and_equals_the_one_used(name):
    optimizer = wrapped(optimizers.scale_by_learning_rate(rate))[name]
    state = jax.eval_shape(optimizer.init, PARAMS)
    assert optimizers.find_learning_rate(state).dtype == jnp.float32
    _, state = run(optimizer, 4, first_step=6)
    assert optimizers.find_learning_rate(state) == np.float32(0.5 / 10)
    assert jax.jit(optimizers.find_learning_rate)(state) == np.float32(0.5 / 10)


def test_the_rate_of_inject_hyperparams_is_found():
    optimizer = optax.chain(
        optax.clip(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=rate)
    )
    _, state = run(optimizer, 4)
    assert optimizers.find_learning_rate(state) == np.float32(0.5 / 4)


def test_our_scale_works_inside_inject_hyperparams():
    def factory(learning_rate):
        return optax.chain(optax.trace(0.9), optimizers.scale_by_learning_rate(learning_rate))

    ours, state = run(optax.inject_hyperparams(factory)(learning_rate=rate), 3)
    chex.assert_trees_all_close(ours, run(optax.sgd(rate, 0.9), 3)[0], rtol=1e-6)
    assert optimizers.find_learning_rate(state) == np.float32(0.5 / 3)


def test_of_several_rates_the_first_in_tree_order_is_found():
    first, second = (optimizers.scale_by_learning_rate(value) for value in (0.25, 0.125))
    labels = jax.tree.map(lambda decayed: "b" if decayed else "a", DECAYED)
    state = optax.multi_transform({"b": first, "a": second}, labels).init(PARAMS)
    assert optimizers.find_learning_rate(state) == 0.125
    assert optimizers.find_learning_rate((state, first.init(PARAMS))) == 0.125


@pytest.mark.parametrize("optimizer", [optax.adam(rate), optax.sgd(0.1), optax.identity()])
def test_where_the_state_holds_no_rate_none_is_found(optimizer):
    assert optimizers.find_learning_rate(optimizer.init(PARAMS)) is None


def test_skipped_updates_do_not_make_the_schedule_lag():
    optimizer = optax.apply_if_finite(optimizers.scale_by_learning_rate(rate), 10)
    state = optimizer.init(PARAMS)
    bad = jax.tree.map(lambda g: g * np.nan, GRADS)
    _, state = optimizer.update(bad, state, PARAMS, step=jnp.int32(0))
    updates, state = optimizer.update(GRADS, state, PARAMS, step=jnp.int32(1))
    chex.assert_trees_all_close(updates, jax.tree.map(lambda g: -0.25 * g, GRADS))


def test_decay_mask_leaves_out_biases_and_norms_of_a_real_network():
    def forward(x):
        x = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(2, 3)(x), True)
        x = hk.LayerNorm(-1, True, True)(x)
        return hk.Linear(3, name="b")(x)  # A module's name does not matter.

    params, _ = hk.transform_with_state(forward).init(jax.random.key(0), jnp.ones((1, 4, 4, 1)))
    mask = optimizers.decay_mask()(params)
    assert mask == {
        "conv2_d": {"w": True, "b": False},
        "batch_norm": {"scale": False, "offset": False},
        "layer_norm": {"scale": False, "offset": False},
        "b": {"w": True, "b": False},
    }
    assert all(jax.tree.leaves(optimizers.decay_mask(())(params)))
    with pytest.raises(UsageError, match="tuple of names"):
        optimizers.decay_mask("b")


def test_mask_by_name_matches_whole_names():
    assert optimizers.mask_by_name(r"net/~/linear/.*")(PARAMS) == {
        "net/~/linear": {"w": True, "b": True},
        "net/~/norm": {"scale": False, "offset": False},
    }
    assert optimizers.mask_by_name(r".*/(w|scale)")(PARAMS)["net/~/norm"]["scale"] is True
    with pytest.raises(UsageError, match=r"linear'. matches none of the 4 .*'net/~/linear/b'"):
        optimizers.mask_by_name("linear")(PARAMS)
    with pytest.raises(UsageError, match="not a regular expression"):
        optimizers.mask_by_name("(")
    assert optimizers.mask_by_name("linear")({}) == {}


def test_a_frozen_layer_does_not_move():
    freeze = optax.masked(optax.set_to_zero(), optimizers.mask_by_name("net/~/linear/.*"))
    params, _ = run(optax.chain(optax.adam(0.1), freeze), 3)
    chex.assert_trees_all_equal(params["net/~/linear"], PARAMS["net/~/linear"])
    assert np.all(params["net/~/norm"]["scale"] != 2.0)


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 100.0])
def test_clipping_equals_optax_and_numpy(max_norm):
    norm = optax.tree.norm(GRADS)
    ours = optimizers.clip_by_global_norm(GRADS, max_norm, norm)
    theirs, _ = optax.clip_by_global_norm(max_norm).update(GRADS, optax.EmptyState())
    chex.assert_trees_all_close(ours, theirs, rtol=1e-6)
    squares = sum(np.sum(np.square(leaf, dtype="f8")) for leaf in jax.tree.leaves(GRADS))
    np.testing.assert_allclose(optax.tree.norm(ours), min(max_norm, squares**0.5), rtol=1e-6)
    if max_norm == 100.0:
        chex.assert_trees_all_equal(ours, GRADS)


def test_clipping_is_safe_at_zero_and_keeps_dtypes():
    grads = {"a": jnp.zeros(3, jnp.bfloat16), "b": jnp.zeros(2)}
    clipped = optimizers.clip_by_global_norm(grads, 1.0, optax.tree.norm(grads))
    chex.assert_trees_all_equal_dtypes(clipped, grads)
    chex.assert_trees_all_equal(clipped, grads)
    poisoned = optimizers.clip_by_global_norm({"a": jnp.array([1.0, jnp.nan])}, 1.0, jnp.nan)
    assert np.all(np.isnan(poisoned["a"]))


def test_ema_averages_floats_and_takes_the_rest():
    old = {
        "float": jnp.array([1.0, 2.0]),
        "half": jnp.linspace(1.0, 2.0, 65).astype(jnp.bfloat16),
        "counter": jnp.int32(3),
        "flag": jnp.array(False),
        "raw": jax.random.PRNGKey(1),
        "typed": jax.random.key(1),
    }
    new = dict(old, float=jnp.array([3.0, -2.0]), half=old["half"][::-1])
    new.update(counter=jnp.int32(4), flag=jnp.array(True))
    new.update(raw=jax.random.PRNGKey(2), typed=jax.random.key(2))
    average = jax.jit(optimizers.ema)(old, new, 0.9)
    chex.assert_trees_all_equal_dtypes(average, old)
    np.testing.assert_allclose(average["float"], [0.9 * 1 + 0.1 * 3, 0.9 * 2 - 0.1 * 2], rtol=1e-6)
    half = np.asarray(old["half"], "f4")  # Taken in float32, and rounded to bfloat16 once.
    np.testing.assert_array_equal(average["half"], jnp.bfloat16(0.9 * half + 0.1 * half[::-1]))
    assert average["counter"] == 4
    assert average["flag"]
    np.testing.assert_array_equal(average["raw"], new["raw"])
    assert average["typed"] == new["typed"]


def test_sgd_equals_its_formula():
    optimizer = optimizers.make_optimizer(
        config(name="sgd", learning_rate=0.1, schedule="linear", weight_decay=0.01, momentum=0.5),
        num_steps=4,
    )
    expected = {}
    for module, leaves in PARAMS.items():
        for name, p in leaves.items():
            p, m = p.astype("f8"), 0.0
            decay = 0.01 if DECAYED[module][name] else 0.0
            for step in range(3):
                m = 0.5 * m + GRADS[module][name] + decay * p
                p = p - 0.1 * (1 - step / 4) * m
            expected.setdefault(module, {})[name] = p
    params, state = run(optimizer, 3)
    chex.assert_trees_all_close(params, expected, rtol=1e-5)
    np.testing.assert_allclose(optimizers.find_learning_rate(state), 0.05, rtol=1e-6)


@pytest.mark.parametrize(
    "changes, theirs",
    [
        ({"name": "sgd", "momentum": 0.0}, lambda r: optax.sgd(r)),
        ({"name": "sgd", "nesterov": True}, lambda r: optax.sgd(r, 0.9, nesterov=True)),
        ({"b1": 0.8, "b2": 0.9, "eps": 1e-3}, lambda r: optax.adam(r, 0.8, 0.9, 1e-3)),
        ({"weight_decay": 0.1}, lambda r: optax.adamw(r, weight_decay=0.1, mask=DECAYED)),
        (
            {"name": "lars", "weight_decay": 0.1},
            lambda r: optax.lars(r, 0.1, DECAYED, trust_ratio_mask=DECAYED),
        ),
        (
            {"name": "lamb", "weight_decay": 0.1},
            lambda r: optax.lamb(r, 0.9, 0.999, 1e-8, 0, 0.1, DECAYED),
        ),
    ],
)
def test_each_optimizer_equals_optaxs_with_the_same_schedule(changes, theirs):
    optimizer = optimizers.make_optimizer(config(learning_rate=0.3, warmup_steps=2, **changes), 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.3, 2, 10)
    params, state = run(optimizer, 6)
    chex.assert_trees_all_close(params, run(theirs(schedule), 6)[0], rtol=1e-5)
    np.testing.assert_allclose(optimizers.find_learning_rate(state), schedule(5), rtol=1e-6)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"name": "adamm"}, "name='adamm'.*did you mean 'adam'"),
        ({"schedule": "cosin"}, "schedule='cosin'.*did you mean 'cosine'"),
        ({"learning_rate": 0.0}, r"learning_rate=0\.0: must be more than 0"),
        ({"learning_rate": math.nan}, "learning_rate=nan: must be more than 0"),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1: must be 0 or more"),
        ({"b2": 1.0}, r"b2=1\.0: must be at least 0 and less than 1"),
        ({"momentum": 0.5}, "momentum=0.5: does nothing with name='adam'; leave it at 0.9"),
        ({"name": "sgd", "b1": 0.5}, "b1=0.5: does nothing with name='sgd'"),
        ({"name": "sgd", "momentum": 0.0, "nesterov": True}, "nesterov=True: does nothing"),
        ({"schedule": "constant", "end_learning_rate": 0.1}, "does nothing with schedule"),
        ({"warmup_steps": 10}, "warmup_steps=10 with num_steps=10"),
        ({"schedule": "constant", "warmup_steps": -1}, "warmup_steps=-1"),
        ({"weight_decai": 0.1}, "weight_decai: .*did you mean 'weight_decay'"),
    ],
)
def test_a_config_mistake_is_one_line_that_names_the_field(changes, message):
    with pytest.raises(UsageError, match=message) as caught:
        optimizers.make_optimizer(config(**changes), 10)
    assert "\n" not in str(caught.value)


def test_a_missing_field_is_named():
    fields = ml_collections.ConfigDict({k: v for k, v in config().items() if k != "b1"})
    with pytest.raises(UsageError, match="b1: missing"):
        optimizers.make_optimizer(fields, 10)


def test_every_config_field_can_be_overridden_from_the_command_line():
    for field, value in config().items():
        assert isinstance(value, str | float | int | bool | tuple), field
    changed = config()
    changed.update_from_flattened_dict({"decay_exclude": (), "warmup_steps": 3})
    assert changed.decay_exclude == ()
