"""Dropout: exact rates, scaling, determinism by key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_equal

from jaxprompt.layers.dropout import Dropout, dropout, sample_keep_mask


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_rate_and_scale(rate):
    n = 1_000_000
    x = np.linspace(1, 2, n, dtype=np.float32)
    actual = np.asarray(dropout(x, rate, jax.random.key(0)))
    dropped = actual == 0
    sigma = np.sqrt(rate * (1 - rate) / n)
    assert abs(dropped.mean() - rate) < 4 * sigma + 1 / 65536
    np.testing.assert_allclose(actual[~dropped], x[~dropped] / (1 - rate), rtol=1e-6)
    neighbours = (dropped[1:] & dropped[:-1]).mean()
    assert abs(neighbours - rate**2) < 0.005


def test_the_key_decides():
    x = np.ones((64, 64), np.float32)
    first, again, other = (dropout(x, 0.3, jax.random.key(seed)) for seed in (0, 0, 1))
    assert_equal(first, again)
    assert (first != other).mean() > 0.3


def test_gradient_passes_where_elements_were_kept():
    x = np.ones(1000, np.float32)
    key = jax.random.key(0)
    grad = jax.grad(lambda x: dropout(x, 0.25, key).sum())(x)
    np.testing.assert_allclose(grad, dropout(x, 0.25, key), rtol=1e-6)


def test_module_is_the_identity_where_it_should_be():
    x = jnp.arange(6.0)
    key = {"dropout": jax.random.key(0)}
    assert_equal(Dropout(0.5).apply({}, x, deterministic=True), x)
    assert_equal(Dropout(0.0).apply({}, x, deterministic=False), x)
    assert (Dropout(0.5).apply({}, x, deterministic=False, rngs=key) != x).any()


def test_bfloat16_stays():
    assert dropout(jnp.ones(8, jnp.bfloat16), 0.1, jax.random.key(0)).dtype == jnp.bfloat16


@pytest.mark.long_cases("small0-large0")
@pytest.mark.parametrize("small, large", [((2, 3, 5, 8), (2, 3, 9, 13)), ((4, 7), (6, 8))])
def test_padding_changes_nothing(small, large):
    """Of hidden states [B, T, H] and probabilities [B, N, T, S], whatever T and S are."""
    key = jax.random.key(3)
    within = tuple(slice(size) for size in small)
    actual = [np.asarray(sample_keep_mask(shape, 0.4, key)) for shape in (small, large)]
    assert_equal(actual[0], actual[1][within])
    rows = actual[1].reshape(-1, large[-1])
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_other_generators_draw_too():
    actual = sample_keep_mask((200, 301), 0.3, jax.random.key(0, impl="rbg"))
    assert actual.shape == (200, 301) and abs(actual.mean() - 0.7) < 0.01
