"""Paths, digests and differences of leaves."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haikutrain import leaves
from haikutrain.errors import UsageError


def test_paths_are_those_of_keystr():
    params = {"net/~/conv": {"w": jnp.ones(2)}, "b": [jnp.zeros(1), (jnp.zeros(1),)]}
    state = {"params": params, "opt_state": optax.adam(0.1).init(params)}
    expected = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]
    }
    assert set(leaves.leaf_table(state)) == expected
    assert {"params/net/~/conv/w", "params/b/1/0", "opt_state/0/mu/net/~/conv/w"} <= expected


def test_nest_undoes_flatten():
    tree = {"a/b": {"w": 1, "c": {"d": 2}}, "e": 3}
    assert leaves.nest(leaves.flatten(tree)) == tree
    assert leaves.nest(leaves.flatten(7)) == 7


def test_two_leaves_of_one_path_are_refused():
    with pytest.raises(UsageError, match="'a/b/c'"):
        leaves.flatten({"a": {"b/c": 1}, "a/b": {"c": 2}})


def test_the_digest_is_sha256_over_path_dtype_shape_and_bytes():
    tree = {"w": np.array([[1, 2]], np.int16), "a": np.float32(0.5)}
    content = b"a\0float32\0\0" + np.float32(0.5).tobytes()
    content += b"w\0int16\0001,2\0" + np.array([1, 2], np.int16).tobytes()
    assert leaves.digest(tree) == hashlib.sha256(content).hexdigest()


def test_the_digest_sees_values_types_shapes_and_names_but_not_where_they_lie():
    base = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    same = [
        {"w": jnp.asarray(base["w"])},
        {"w": np.asfortranarray(base["w"])},
        {"w": base["w"].astype(">f4")},
        leaves.leaf_table(base),
    ]
    other = [
        {"v": base["w"]},
        {"w": base["w"].reshape(3, 2)},
        {"w": base["w"].astype(np.float64)},
        {"w": base["w"] + 1},
        {"w": base["w"].view(np.int32)},
    ]
    assert {leaves.digest(tree) for tree in same} == {leaves.digest(base)}
    assert len({leaves.digest(tree) for tree in [base, *other]}) == 6
    key = jax.random.key(3)
    assert leaves.digest({"k": key}) == leaves.digest({"k": jax.random.key_data(key)})


def test_crc32_is_over_the_bytes_in_c_order():
    assert leaves.crc32(np.frombuffer(b"123456789", np.uint8)) == 0xCBF43926
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert leaves.crc32(np.asfortranarray(array)) == leaves.crc32(array)
    assert leaves.crc32(array.T) != leaves.crc32(array)
    assert leaves.crc32(jnp.ones(4, jnp.bfloat16)) == leaves.crc32(np.full(4, 0x3F80, np.uint16))


def test_describe_is_the_same_for_arrays_and_their_shapes():
    tree = {
        "w": jnp.ones((2, 3), jnp.bfloat16),
        "n": jnp.int8(3),
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
    }
    shapes = jax.eval_shape(lambda: tree)
    for name, text in (("w", "bfloat16[2,3]"), ("n", "int8[]"), ("keys", "key<rbg>[3]")):
        leaf = leaves.describe(name, tree[name])
        assert leaf == leaves.describe(name, shapes[name])
        assert str(leaf) == text
    assert leaves.describe("keys", tree["keys"]).shape == (3, 4)
    assert leaves.describe("w", tree["w"]).nbytes == 12
    assert leaves.describe("x", 2.5).dtype == "float32"
    with pytest.raises(UsageError, match="extras/x is a str"):
        leaves.describe("extras/x", "text")


def test_differences_are_complete_and_by_path():
    saved = {"a": leaves.Leaf((1,), "int32"), "b": leaves.Leaf((), "bool")}
    wanted = {"a": leaves.Leaf((2,), "int32"), "c": leaves.Leaf((), "bool")}
    assert leaves.differences(saved, saved) == []
    assert leaves.differences(saved, wanted) == [
        "a is int32[1] in the checkpoint and int32[2] in the experiment",
        "c (bool[] in the experiment) is not in the checkpoint",
        "b (bool[] in the checkpoint) is not in the experiment",
    ]
