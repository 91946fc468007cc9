"""A split written out is JAX's own, bit for bit, and Haiku's sequence of keys is unchanged."""

import haiku as hk
import jax
import numpy as np
import pytest

from haikutrain import keys
from haikutrain.leaves import is_key

SEEDS = (0, 1, 42, 2**31 - 1, 2**31, 2**32 - 1)


def bits(key):
    return np.asarray(jax.random.key_data(key) if is_key(key) else key).tolist()


@pytest.mark.parametrize(
    "make",
    [jax.random.PRNGKey, jax.random.key, lambda seed: jax.random.key(seed, impl="rbg")],
    ids=["raw", "typed", "rbg"],
)
@pytest.mark.parametrize("split", [keys.split, jax.jit(keys.split)], ids=["eager", "jit"])
def test_it_is_jaxs_split_and_haikus_sequence(make, split):
    """Along chains of splits, so that keys of all kinds of bits are met."""
    for seed in SEEDS:
        key, sequence = make(seed), hk.PRNGSequence(make(seed))
        for _ in range(25):
            first, second = split(key)
            wanted = jax.random.split(key)
            (drawn,) = sequence.take(1)
            assert first.dtype == key.dtype
            assert [bits(first), bits(second)] == [bits(wanted[0]), bits(wanted[1])]
            assert [bits(first), bits(second)] == [bits(sequence.internal_state[0]), bits(drawn)]
            key = first


@pytest.mark.parametrize(
    "field, value",
    [
        ("jax_threefry_partitionable", False),
        ("jax_default_prng_impl", "rbg"),
    ],
)
def test_it_follows_jaxs_configuration(field, value):
    before = getattr(jax.config, field)
    jax.config.update(field, value)
    try:
        key = jax.random.PRNGKey(3)
        assert [bits(part) for part in keys.split(key)] == bits(jax.random.split(key))
    finally:
        jax.config.update(field, before)


def test_it_is_one_computation_without_a_loop():
    hlo = jax.jit(keys.split).lower(jax.random.PRNGKey(0)).compile().as_text()
    assert " while(" not in hlo
    assert " while(" in jax.jit(jax.random.split).lower(jax.random.PRNGKey(0)).compile().as_text()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_runs_first_keys_are_those_of_haikus_sequence(seed):
    wanted = hk.PRNGSequence(seed).take(3)
    assert [bits(key) for key in keys.first(seed, 3)] == [bits(key) for key in wanted]
