"""Keys depend on seed, name and step alone."""

import zlib

import jax
import numpy as np
import pytest

from jaxprompt import rng


def test_key_is_the_seed_folded_with_the_name():
    expected = jax.random.fold_in(jax.random.key(7), zlib.crc32(b"dropout"))
    assert rng.key_for(7, "dropout") == expected
    assert rng.at_step(expected, 3) == jax.random.fold_in(expected, 3)


def test_keys_differ_and_repeat():
    keys = [
        rng.at_step(rng.key_for(seed, name), step)
        for seed in (0, 1)
        for name in ("init", "dropout")
        for step in (0, 1, 2)
    ]
    data = {tuple(np.asarray(jax.random.key_data(key))) for key in keys}
    assert len(data) == len(keys)
    assert rng.key_for(1, "init") == rng.key_for(1, "init")


def test_at_step_is_traceable():
    key = rng.key_for(0, "dropout")
    assert jax.jit(rng.at_step)(key, 5) == rng.at_step(key, 5)


@pytest.mark.parametrize("generator", rng.GENERATORS)
def test_a_key_is_read_from_its_numbers(generator):
    impl, words = rng.GENERATORS[generator]
    key = rng.key_for(7, "dropout", generator)
    numbers = jax.random.key_data(key)
    assert numbers.shape == (words,) and str(jax.random.key_impl(key)) == impl
    assert rng.from_key_data(numbers) == key
    assert jax.jit(lambda x: jax.random.bits(rng.from_key_data(x)))(numbers) == jax.random.bits(key)
