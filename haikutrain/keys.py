"""A run's first keys, and one split of a key as one fused computation.

`jax.random.split` of a threefry key is a loop of rounds on CPU, and that loop inside the loop over
the steps of a call takes longer than a small layer. The same bits come from the rounds written out.
"""

import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haikutrain.leaves import is_key

# J. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011): Threefry-2x32, 20 rounds.
_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def first(seed: int, count: int) -> list[jax.Array]:
    """The first `count` keys of a `hk.PRNGSequence(seed)`, raw."""
    return _first(np.uint32(seed), count)


@functools.partial(jax.jit, static_argnums=1)
def _first(seed: jax.Array, count: int) -> list[jax.Array]:
    # As one program: each of its parts compiles about as long as all of them in one.
    return list(hk.PRNGSequence(jax.random.PRNGKey(seed)).take(count))


def split(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two keys of `jax.random.split(key)`, bit for bit.

    Args:
      key: typed, or raw; of any implementation.
    """
    if not _is_threefry(key):
        first, second = jax.random.split(key)
        return first, second
    data = jax.random.key_data(key) if is_key(key) else key
    lanes = _threefry(data, jnp.zeros(2, jnp.uint32), jnp.arange(2, dtype=jnp.uint32))
    new = jnp.stack(lanes, axis=1)
    if is_key(key):
        new = jax.random.wrap_key_data(new, impl=jax.random.key_impl(key))
    return new[0], new[1]


def _is_threefry(key: jax.Array) -> bool:
    """Whether JAX would split this key by counting, as below."""
    settings: Any = jax.config
    impl = jax.random.key_impl(key) if is_key(key) else settings.jax_default_prng_impl
    return str(impl) == "threefry2x32" and settings.jax_threefry_partitionable


def _threefry(key: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for i in range(5):
        for turn in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << jnp.uint32(turn)) | (x1 >> jnp.uint32(32 - turn)))
        x0 = x0 + schedule[(i + 1) % 3]
        x1 = x1 + schedule[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1
