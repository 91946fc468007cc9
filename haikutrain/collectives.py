"""What the devices do together, inside a program: means, sums, broadcast, comparison.

Every function here is called where `AXIS` is bound: in what `devices.Program` maps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from haikutrain.leaves import is_key

AXIS = "devices"
"""The name of the axis that every program is mapped over, for `cross_replica_axis=` and `lax`."""

# Packing costs a copy, an operand of its own costs the collective's fixed price: below this many
# elements the copy is cheaper.
_PACKED_BELOW = 1 << 16


def _packed(leaves: Sequence[jax.Array], collective: Callable[..., Any]) -> list[jax.Array]:
    """One collective over all leaves; small ones of equal dtype share a buffer."""
    if lax.axis_size(AXIS) == 1:
        return list(leaves)
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        own = leaf.size >= _PACKED_BELOW
        groups.setdefault(index if own else leaf.dtype, []).append(index)
    buffers = [
        jnp.concatenate([leaves[i].ravel() for i in group]) if len(group) > 1 else leaves[group[0]]
        for group in groups.values()
    ]
    reduced = collective(buffers, AXIS)
    out = list(leaves)
    for group, buffer in zip(groups.values(), reduced, strict=True):
        ends = np.cumsum([leaves[i].size for i in group])[:-1]
        parts = jnp.split(buffer, ends) if len(group) > 1 else [buffer]
        for index, part in zip(group, parts, strict=True):
            out[index] = part.reshape(leaves[index].shape)
    return out


def _reduce_floats(tree: Any, collective: Callable[..., Any]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [leaf if is_key(leaf) else jnp.asarray(leaf) for leaf in leaves]
    which = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]
    # Sums of float16 overflow and sums of bfloat16 lose digits: reduce both in float32.
    wide = [arrays[i].astype(jnp.promote_types(arrays[i].dtype, jnp.float32)) for i in which]
    for i, value in zip(which, _packed(wide, collective), strict=True):
        arrays[i] = value.astype(arrays[i].dtype)
    return jax.tree.unflatten(treedef, arrays)


def pmean(tree: Any) -> Any:
    """Averages the float leaves of a tree over all devices, in one collective.

    Integer, boolean and key leaves are returned as they are: Haiku's BatchNorm counts steps in
    int32, and `lax.pmean` would make a float of it. float16 and bfloat16 are summed in float32.
    To be used inside `update` and `evaluate`, for the update's whole tree at once: one packed
    collective is much cheaper than many.
    """
    return _reduce_floats(tree, lax.pmean)


def psum(tree: Any) -> Any:
    """Sums the float leaves of a tree over all devices, in one collective. See `pmean`."""
    return _reduce_floats(tree, lax.psum)


def _unsigned(dtype: Any) -> Any:
    """The unsigned type of as many bits, 32 at most: int4 has 4, though NumPy gives it a byte."""
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return jnp.dtype(f"uint{min(info(dtype).bits, 32)}")


def gather(tree: Any) -> Any:
    """The rows of all devices on each: leaves `[B, ...]` become `[D * B, ...]`, in device order."""
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, AXIS, tiled=True), tree)


def _to_bits(leaf: jax.Array) -> jax.Array:
    """The exact bits of any leaf as uint32."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    return lax.bitcast_convert_type(leaf, _unsigned(leaf.dtype)).astype(jnp.uint32)


def _from_bits(bits: jax.Array, like: jax.Array) -> jax.Array:
    if is_key(like):
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(like))
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        parts = lax.bitcast_convert_type(bits, like.real.dtype)
        return lax.complex(parts[0], parts[1])
    if like.dtype == jnp.bool_:
        return bits.astype(like.dtype)
    return lax.bitcast_convert_type(bits.astype(_unsigned(like.dtype)), like.dtype)


def broadcast(tree: Any) -> Any:
    """Every device's values become those of the first one, bit for bit."""
    leaves, treedef = jax.tree.flatten(tree)
    first = lax.axis_index(AXIS) == 0
    bits = [_to_bits(leaf) for leaf in leaves]
    chosen = _packed([jnp.where(first, b, jnp.zeros_like(b)) for b in bits], lax.psum)
    return jax.tree.unflatten(
        treedef, [_from_bits(b, x) for b, x in zip(chosen, leaves, strict=True)]
    )


def differs(tree: Any) -> jax.Array:
    """bool [leaves]: which leaves are not the same bits on every device."""

    def fingerprint(leaf: jax.Array) -> jax.Array:
        bits = _to_bits(leaf).ravel()
        # Odd weights: any change of one element changes the sum modulo 2**32.
        weights = lax.iota(jnp.uint32, bits.size) * jnp.uint32(0x9E3779B2) | jnp.uint32(1)
        return jnp.sum(bits * weights, dtype=jnp.uint32)

    prints = jnp.stack([fingerprint(leaf) for leaf in jax.tree.leaves(tree)])
    highest = lax.pmax(jnp.stack([prints, ~prints]), AXIS)
    return highest[0] != ~highest[1]
