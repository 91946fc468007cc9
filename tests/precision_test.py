"""Mixed precision: what computes in bfloat16, and what stays float32."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haikutrain
from haikutrain import devices, precision
from haikutrain.eval_feed import EvalFeed
from haikutrain.programs import Programs

BF16 = "params=float32,compute=bfloat16,output=float32"
PRODUCTS = ("dot_general", "conv_general_dilated")


class OwnNorm(hk.BatchNorm):
    """A subclass, as libraries and users write them."""


class Net(haikutrain.Experiment):
    """Convolution, norms, attention, and parameters outside of any module."""

    def __init__(self, config):
        super().__init__(config)
        self.dtypes = {}

    def loss(self, batch, is_training):
        norm = {"plain": hk.BatchNorm, "own": OwnNorm}[self.config.norm]
        x = jax.nn.relu(norm(True, True, 0.9)(hk.Conv2D(8, 3)(batch["image"]), is_training))
        x = x.reshape(x.shape[0], -1, 8)
        x = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling())(x, x, x)
        logits = hk.nets.MLP([16, 3])(hk.Flatten()(x))
        scale = hk.get_parameter("scale", [], logits.dtype, init=jnp.ones)
        hk.set_state("last", logits.mean())
        losses = optax.softmax_cross_entropy_with_integer_labels(logits * scale, batch["label"])
        self.dtypes.update(logits=logits.dtype, scale=scale.dtype, losses=losses.dtype)
        return losses, {"accuracy": logits.argmax(-1) == batch["label"]}

    def optimizer(self):
        def update(grads, state, params=None):
            self.dtypes["gradients"] = float_dtypes(grads)
            return optax.sgd(0.1).update(grads, state, params)

        return optax.GradientTransformation(optax.sgd(0.1).init, update)

    def train_data(self):
        rng = np.random.default_rng(0)
        label = rng.integers(0, 3, 32)
        image = rng.normal(size=(32, 4, 4, 1)) + 2 * label[:, None, None, None]
        return haikutrain.ArrayDataset({"image": image.astype(np.float32), "label": label}, 16, 0)


def config(precision, **changes):
    result = haikutrain.base_config()
    result.update(experiment="here:Net", num_steps=4, batch_size=16, precision=precision)
    result.update(norm="plain")
    result.update(changes)
    return result


def programs(task):
    return Programs(task, task.train_data().batch(0))


def equations(jaxpr):
    """All of a jaxpr, those inside of others included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def operand_dtypes(jaxpr, names=PRODUCTS):
    return [
        tuple(var.aval.dtype.name for var in equation.invars)
        for equation in equations(jaxpr)
        if equation.primitive.name in names
    ]


def float_dtypes(tree):
    leaves = jax.tree.leaves(tree)
    return {leaf.dtype.name for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}


@pytest.mark.parametrize("norm", ["plain", "own"])
def test_products_are_bfloat16_and_the_rest_float32(norm):
    task = Net(config(BF16, norm=norm))
    made = programs(task)
    step = made._step
    products = operand_dtypes(step.jaxpr.jaxpr)
    # Forward: a convolution, four products of attention and its two, and two layers; each again
    # twice on the way back, but for the gradient of the image.
    assert len(products) == 3 * (1 + 4 + 2 + 2) - 1
    assert set(products) == {("bfloat16", "bfloat16")}
    assert task.dtypes == {
        "logits": jnp.float32,
        "scale": jnp.float32,
        "losses": jnp.float32,
        "gradients": {"float32"},
    }
    assert float_dtypes(made.state) == {"float32"}
    assert float_dtypes(step.output) == {"float32"}


def test_without_a_policy_and_with_a_plain_one_the_update_is_the_same_program():
    texts = {
        text: str(programs(Net(config(text)))._step.jaxpr)
        for text in (None, "params=float32,compute=float32,output=float32", "float32", BF16)
    }
    assert texts["params=float32,compute=float32,output=float32"] == texts[None]
    assert texts["float32"] == texts[None]
    assert "bf16" not in texts[None]
    assert "bf16" in texts[BF16]


def tiny_in(tiny, text):
    changed = tiny.get_config("mlp-exact")
    changed.precision = text
    return tiny.Tiny(changed)


def test_training_and_evaluation_stay_near_float32s(drive, tiny):
    tasks = [tiny_in(tiny, text) for text in (None, BF16)]
    exact, metrics_of_exact = drive(tasks[0], steps=8)
    half, metrics = drive(tasks[1], steps=8)
    for one, other in zip(metrics, metrics_of_exact, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-2)
        assert one["loss"] != other["loss"]
    assert int(half[8].network_state["batch_norm/~/mean_ema"]["counter"]) == 8
    feed = EvalFeed(haikutrain.ArrayDataset(tiny.arrays(), 52), "test", 52)
    losses = []
    for task in tasks:
        result = programs(task).evaluate(devices.place(exact[8]), "test", next(feed.items()))
        losses.append(float(result["sums"]["loss"] / result["count"]))
    assert losses[0] == pytest.approx(losses[1], abs=2e-2)
    assert losses[0] != losses[1]


def under(text, function):
    """The Haiku function under a policy, transformed."""

    def under_policy(*arguments):
        with precision.applied(precision.policy(text)):
            return function(*arguments)

    return hk.transform_with_state(under_policy)


def run(function, *arguments, text=BF16):
    """The result, params and state of a Haiku function under a policy."""
    network = under(text, function)
    params, state = network.init(jax.random.key(0), *arguments)
    result, state = network.apply(params, state, None, *arguments)
    return result, params, state


@pytest.mark.parametrize("norm", [hk.BatchNorm, OwnNorm])
@pytest.mark.parametrize("inside", [False, True])
def test_batch_norm_keeps_statistics_that_bfloat16_cannot(norm, inside):
    """Mean 64, variance 1: bfloat16 would square to multiples of 32, and find a variance of 0."""
    x = np.random.default_rng(0).normal(64, 1, (512, 3)).astype(np.float32)

    class Around(hk.Module):
        def __call__(self, x):
            return norm(True, True, 0.9, name="norm")(x, True)

    def function(x):
        return Around()(x) if inside else norm(True, True, 0.9, name="norm")(x, True)

    result, params, state = run(function, x)
    seen = x.astype(jnp.bfloat16).astype(np.float64) if inside else x.astype(np.float64)
    (mean,) = (leaf["average"] for name, leaf in state.items() if name.endswith("mean_ema"))
    (var,) = (leaf["average"] for name, leaf in state.items() if name.endswith("var_ema"))
    np.testing.assert_allclose(mean[0], seen.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(var[0], seen.var(axis=0), rtol=1e-2)
    assert np.asarray(result).std() == pytest.approx(1, abs=1e-2)
    assert result.dtype == jnp.float32
    assert float_dtypes((params, state)) == {"float32"}


def test_state_is_float32_whatever_a_module_asks_for_or_sets():
    class Keeping(hk.Module):
        def __call__(self, x):
            asked = hk.get_state("asked", [3], x.dtype, init=jnp.zeros)
            hk.set_state("asked", (asked + x.mean(axis=0)).astype(x.dtype))
            hk.set_state("only_set", {"mean": x.mean(axis=0), "rows": jnp.int32(x.shape[0])})
            assert x.dtype == jnp.bfloat16
            return x

    network = under(BF16, lambda x: Keeping()(x))
    x = np.full((2, 3), 0.5, np.float32)
    _, first = network.init(None, x)
    _, second = network.apply({}, first, None, x)
    for state in (first, second):
        assert float_dtypes(state) == {"float32"}
        assert state["keeping"]["only_set"]["rows"].dtype == jnp.int32
    np.testing.assert_array_equal(second["keeping"]["asked"], [0.5] * 3)


@pytest.mark.parametrize("output", ["float32", "bfloat16", "float16"])
def test_the_outermost_module_returns_the_output_type_and_inner_ones_compute(output):
    inner = []

    class Outer(hk.Module):
        def __call__(self, x):
            x = hk.Linear(4)(x)
            inner.append(x.dtype.name)
            x = hk.LayerNorm(-1, True, True)(x)
            inner.append(x.dtype.name)
            return {"x": x, "count": jnp.int32(3)}

    text = f"params=float32,compute=bfloat16,output={output}"
    result, _, _ = run(lambda x: Outer()(x), np.ones((2, 3), np.float32), text=text)
    assert set(inner) == {"bfloat16"}
    assert (result["x"].dtype, result["count"].dtype) == (jnp.dtype(output), jnp.int32)


def test_a_deep_network_multiplies_in_bfloat16_throughout():
    def function(x):
        blocks = {"blocks_per_group": (1, 1, 1, 1), "channels_per_group": (8, 8, 8, 8)}
        network = hk.nets.ResNet(**blocks, num_classes=5, resnet_v2=True, bottleneck=False)
        return network(x, True)

    x = np.zeros((2, 32, 32, 3), np.float32)
    jaxpr = jax.make_jaxpr(lambda x: run(function, x))(x).jaxpr
    # Init and apply: the first convolution, two of each block and its shortcut, and the head.
    assert len(operand_dtypes(jaxpr)) == 2 * (1 + 4 * 3 + 1)
    assert set(operand_dtypes(jaxpr)) == {("bfloat16", "bfloat16")}
    _, params, state = jax.eval_shape(lambda x: run(function, x), x)
    assert float_dtypes((params, state)) == {"float32"}


def test_half_params_leave_the_network_state_in_float32(drive, tiny):
    text = "params=bfloat16,compute=bfloat16,output=float32"
    states, _ = drive(tiny_in(tiny, text), steps=2)
    for state in states:
        assert float_dtypes(state.params) == {"bfloat16"}
        assert float_dtypes(state.network_state) == {"float32"}


class HalfState(Net):
    def init(self, rngs, batch):
        state = super().init(rngs, batch)
        last = {"last": state.network_state["~"]["last"].astype(jnp.bfloat16)}
        return state.replace(network_state={**state.network_state, "~": last})


def test_a_network_state_that_is_not_float32_is_refused_before_it_compiles():
    with pytest.raises(haikutrain.UsageError, match="must stay float32, but ~/last is bfloat16;"):
        programs(HalfState(config(BF16)))


def test_what_is_no_policy_is_refused():
    for text in ("compute=float12", "params=float32;compute=float32", "fast"):
        with pytest.raises(haikutrain.UsageError, match=r"config\.precision=.* is no jmp policy"):
            precision.policy(text)
    assert precision.policy(None) is None
    assert precision.policy("float32") is None
