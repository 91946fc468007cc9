"""Means, broadcast and comparison over four devices, against NumPy and bit for bit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import haikutrain
from haikutrain import collectives, devices, metrics
from haikutrain.programs import Programs

DEVICES = 4
LARGE = collectives._PACKED_BELOW  # A leaf of this size is reduced on its own.


def on_devices(function, *arguments):
    """What `function` returns on each device, stacked; every argument has a device axis."""
    return jax.pmap(function, axis_name=haikutrain.AXIS)(*arguments)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(DEVICES, *shape)).astype(np.float32)


def test_pmean_is_numpys_mean_for_floats_and_leaves_the_rest_alone():
    counts = np.arange(DEVICES, dtype=np.int32)
    keys = jax.vmap(jax.random.key)(jnp.arange(DEVICES))
    # Multiples of 1/4 have a mean over 4 that both half types hold exactly.
    halves = np.arange(DEVICES * 3).reshape(DEVICES, 3) / 4
    tree = {
        "floats": {"a": random(3, 2), "b": random(seed=1), "none": random(0)},
        "large": random(LARGE, seed=2),
        "larger": random(LARGE + 1, seed=3),
        "float16": halves.astype(np.float16),
        "bfloat16": jnp.asarray(halves, jnp.bfloat16),
        "complex64": random(5) + 1j * random(5, seed=4),
        "counter": counts,
        "flags": counts % 2 == 0,
        "bytes": counts.astype(np.uint8),
        "keys": keys,
    }
    got = on_devices(haikutrain.pmean, tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(
        lambda x: (x.shape, x.dtype), tree
    )
    alone = ("counter", "flags", "bytes", "keys")
    for name, leaf in tree.items():
        for before, after in zip(jax.tree.leaves(leaf), jax.tree.leaves(got[name]), strict=True):
            if name == "keys":
                before, after = jax.random.key_data(before), jax.random.key_data(after)
            before = np.asarray(before)
            if name in alone:
                np.testing.assert_array_equal(after, before)
                continue
            wide = before.astype(np.complex128 if name == "complex64" else np.float64)
            mean = np.broadcast_to(wide.mean(axis=0), before.shape)
            exact = name in ("float16", "bfloat16")
            np.testing.assert_allclose(
                np.asarray(after).astype(wide.dtype), mean, rtol=0 if exact else 1e-6, atol=1e-7
            )


def test_psum_is_numpys_sum():
    tree = {"a": random(3), "count": np.full(DEVICES, 5, np.int32)}
    got = on_devices(haikutrain.psum, tree)
    np.testing.assert_allclose(got["a"][2], tree["a"].sum(axis=0), rtol=1e-6)
    assert got["count"].tolist() == [5, 5, 5, 5]


def test_half_precision_is_summed_in_float32():
    # 4 x 30000 is beyond float16's 65504; 256 + 1 is 256 in bfloat16.
    got = on_devices(haikutrain.pmean, np.full((DEVICES, 2), 30000, np.float16))
    np.testing.assert_array_equal(got, np.full((DEVICES, 2), 30000, np.float16))
    rows = jnp.asarray([[256.0], [1.0], [1.0], [6.0]], jnp.bfloat16)
    np.testing.assert_array_equal(on_devices(haikutrain.pmean, rows)[0], [66.0])


def all_reduces(hlo):
    """How many operands each all-reduce of a compiled program has."""
    found = re.findall(r" all-reduce(?:-start)?\(([^)]*)\)", hlo)
    return [len(operands.split("%")) - 1 for operands in found]


def test_small_leaves_of_one_dtype_are_one_operand_of_one_all_reduce():
    tree = [np.zeros((DEVICES, n), np.float32) for n in (1, 2, 3, LARGE - 1, LARGE, LARGE + 1)]
    tree.append(np.zeros((DEVICES, 3), np.float16))  # Summed in float32: shares the buffer.
    tree.append(np.zeros((DEVICES, 3), np.int32))
    function = jax.pmap(haikutrain.pmean, axis_name=haikutrain.AXIS)
    assert all_reduces(function.lower(tree).compile().as_text()) == [3]


def test_the_update_has_one_all_reduce_with_one_operand(tiny):
    """Gradients, local BatchNorm's moving averages and metrics share one buffer."""
    config = tiny.get_config()
    batch = haikutrain.ArrayDataset(tiny.arrays(), config.batch_size).batch(0)
    made = Programs(tiny.Tiny(config), batch)
    floats = [x for x in jax.tree.leaves(made.state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert len(floats) > 10
    sums = devices.place(metrics.empty_window(made.metric_names))
    update = made._update_program(1)._pmapped
    lowered = update.lower(made.state, sums, devices.place_batch(batch))
    assert all_reduces(lowered.compile().as_text()) == [1]


BITS = {
    "float32": np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000], np.uint32),
    "float16": np.array([0x7E01, 0xFE7F, 0x8000, 0x0001, 0x7C00], np.uint16),
    "bfloat16": np.array([0x7FC1, 0xFFC7, 0x8000, 0x0001, 0x7F80], np.uint16),
    "float8_e4m3fn": np.array([0x7F, 0xFF, 0x80, 0x01, 0x7E], np.uint8),
    "complex64": np.array([[0x7FC00001, 0x80000000], [0x80000000, 0xFFC12345]], np.uint32),
    "int32": np.array([-1, -(2**31), 2**31 - 1], np.int32).view(np.uint32),
    "uint32": np.array([2**32 - 1, 1], np.uint32),
    "int16": np.array([-1, -(2**15)], np.int16).view(np.uint16),
    "int8": np.array([-1, -128, 127], np.int8).view(np.uint8),
    "uint8": np.array([255, 1], np.uint8),
    "bool": np.array([1, 0], np.uint8),
    "int4": np.array([0xF8, 0x07, 0xFF], np.uint8),
    "float4_e2m1fn": np.array([0x08, 0x0F, 0x01], np.uint8),
}


def as_dtype(bits, name):
    """`[N]` of the dtype with these bits."""
    return jnp.asarray(
        bits.astype(bool) if name == "bool" else bits.view(jnp.dtype(name)).reshape(-1)
    )


def raw(array):
    array = np.asarray(array)
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("name", BITS)
def test_broadcast_gives_every_device_the_bits_of_the_first(name):
    """NaN payloads, -0.0 and denormals included; the other devices hold something else."""
    first = as_dtype(BITS[name], name)
    rows = jnp.stack([first, *[jnp.ones_like(first)] * (DEVICES - 1)])
    got = on_devices(collectives.broadcast, {"x": rows})["x"]
    assert got.dtype == rows.dtype
    for device in range(DEVICES):
        np.testing.assert_array_equal(raw(got)[device], raw(rows)[0])


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_broadcast_takes_typed_and_raw_keys(impl):
    keys = jax.vmap(lambda seed: jax.random.key(seed, impl=impl))(jnp.arange(7, 7 + DEVICES))
    got = on_devices(collectives.broadcast, {"typed": keys, "raw": jax.random.key_data(keys)})
    assert jax.random.key_impl(got["typed"]) == impl
    for device in range(DEVICES):
        np.testing.assert_array_equal(
            jax.random.key_data(got["typed"])[device], jax.random.key_data(keys)[0]
        )
        np.testing.assert_array_equal(got["raw"][device], jax.random.key_data(keys)[0])


def replicated(tree, change):
    """A replicated tree of arrays of which device 2 holds what `change` makes of it."""

    def function(tree, _):
        return jax.tree.map(
            lambda a, b: jnp.where(lax.axis_index(haikutrain.AXIS) == 2, a, b), change(tree), tree
        )

    mapped = jax.pmap(function, axis_name=haikutrain.AXIS, in_axes=(None, 0), out_axes=None)
    return mapped(tree, np.zeros(DEVICES))


def test_drifted_names_the_leaves_that_differ_and_no_other():
    tree = {
        "params": {"linear/~/a": {"w": jnp.ones((3, 5)), "b": jnp.zeros(5, jnp.bfloat16)}},
        "network_state": {"norm": {"nan": jnp.full(3, jnp.nan), "zero": jnp.zeros(())}},
        "step": jnp.int32(7),
        "flag": jnp.array(True),
        "key": jax.random.key(1),
        "empty": jnp.zeros((0, 3)),
        "large": jnp.arange(LARGE, dtype=jnp.float32),
    }
    assert devices.drifted(replicated(tree, lambda t: t)) == []

    def change(t):
        new = jax.tree.map(lambda x: x, t)
        new["params"]["linear/~/a"]["b"] = t["params"]["linear/~/a"]["b"].at[4].set(1e-30)
        new["network_state"]["norm"]["zero"] = -t["network_state"]["norm"]["zero"]  # -0.0
        new["flag"] = ~t["flag"]
        new["key"] = jax.random.fold_in(t["key"], 1)
        new["large"] = t["large"].at[LARGE - 1].add(1.0)
        return new

    assert devices.drifted(replicated(tree, change)) == [
        "flag",
        "key",
        "large",
        "network_state/norm/zero",
        "params/linear/~/a/b",
    ]


def test_drifted_sees_two_elements_swapped():
    tree = {"w": jnp.array([1.0, 2.0, 3.0, 4.0])}
    swapped = replicated(tree, lambda t: {"w": t["w"][jnp.array([1, 0, 2, 3])]})
    assert devices.drifted(swapped) == ["w"]
