"""Slots written over word embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_equal

from jaxprompt.layers.embed import Table, write_slots

B, T, S, E = 2, 5, 3, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, E)).astype(np.float32)
SLOT = np.array([[-1, 0, 1, 2, -1], [2, 2, -1, -1, 0]], np.int32)


@pytest.mark.parametrize("rows", [1, B])
def test_rows_stand_where_the_slots_say(rows):
    slots = RNG.normal(size=(rows, S, E)).astype(np.float32) * 1e3
    expected = X.copy()
    for b in range(B):
        for t in range(T):
            if SLOT[b, t] >= 0:
                expected[b, t] = slots[b % rows, SLOT[b, t]]
    assert_equal(write_slots(X, SLOT, slots), expected)


def test_the_gradient_of_a_row_is_the_sum_over_its_places():
    slots = RNG.normal(size=(1, S, E)).astype(np.float32)
    out = RNG.normal(size=(B, T, E)).astype(np.float32)
    loss = lambda x, slots: (write_slots(x, SLOT, slots) * out).sum()
    to_x, to_slots = jax.grad(loss, argnums=(0, 1))(X, slots)
    expected = np.zeros((1, S, E), np.float32)
    for b, t in np.argwhere(SLOT >= 0):
        expected[0, SLOT[b, t]] += out[b, t]
    np.testing.assert_allclose(to_slots, expected, rtol=1e-6)
    assert_equal(to_x, np.where(SLOT[..., None] >= 0, 0, out).astype(np.float32))


def test_the_gradient_of_float32_rows_is_summed_in_float32():
    """Of bfloat16 activations too: their sum over a large batch would lose what each row adds."""
    rows = 512
    out = jnp.asarray(RNG.uniform(1, 2, (rows, T, E)), jnp.bfloat16)
    x, slot = jnp.zeros((rows, T, E), jnp.bfloat16), np.tile(SLOT[:1], (rows, 1))
    loss = lambda slots: (write_slots(x, slot, slots) * out).astype(jnp.float32).sum()
    grads = jax.grad(loss)(np.ones((1, S, E), np.float32))
    expected = np.asarray(out, np.float64).sum(0)[None, 1 : 1 + S]  # row s stands at s + 1
    np.testing.assert_allclose(grads, expected, rtol=1e-6)


def test_the_gradient_has_no_scatter():
    slots = RNG.normal(size=(1, S, E)).astype(np.float32)
    grad = jax.grad(lambda s: write_slots(X, SLOT, s).sum())
    assert "scatter" not in str(jax.make_jaxpr(grad)(slots))


def test_float32_rows_are_cast_to_the_activations():
    actual = write_slots(X.astype(jnp.bfloat16), SLOT, np.ones((1, S, E), np.float32))
    assert actual.dtype == jnp.bfloat16


def test_table_looks_up_and_casts():
    table = RNG.normal(size=(7, E)).astype(np.float32)
    ids = np.array([[6, 0], [3, 3]])
    params = {"params": {"table": table}}
    assert_equal(Table(7, E).apply(params, ids), table[ids])
    assert Table(7, E, jnp.bfloat16).apply(params, ids).dtype == jnp.bfloat16
