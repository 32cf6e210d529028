"""Products against numpy's in float64, and their gradients, in both ways of computing them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxprompt.layers.product import dot_general, einsum
from jaxprompt.layers.quantized import score_table

SHAPES = {  # what attention, dense layers and the output table ask for
    "btnd,bsnd->bnts": ((2, 5, 3, 4), (2, 6, 3, 4)),
    "bnts,bsnd->btnd": ((2, 3, 5, 6), (2, 6, 3, 4)),
    "bnts,bsh->btnh": ((2, 3, 5, 6), (2, 6, 4)),
    "btw,wnd->btnd": ((2, 5, 8), (8, 3, 4)),
    "btnd,ndw->btw": ((2, 5, 3, 4), (3, 4, 8)),
    "tw,wf->tf": ((1, 8), (8, 16)),
}


def draw(shape, seed, dtype):
    return jnp.asarray(np.random.RandomState(seed).randn(*shape), dtype)


def wide(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("result", [None, jnp.float32])
@pytest.mark.parametrize("equation", SHAPES)
def test_einsum_is_numpys(equation, result, dtype):
    x, y = (draw(shape, i, dtype) for i, shape in enumerate(SHAPES[equation]))
    run = jax.jit(lambda x, y: einsum(equation, x, y, result))
    actual, back = jax.vjp(run, x, y)
    assert actual.dtype == (result or dtype)
    want = np.einsum(equation, *wide(x, y))
    near = lambda a, b, rate: np.testing.assert_allclose(
        np.asarray(a, np.float64), b, atol=rate * np.abs(b).max()
    )
    rate = 1e-6 if actual.dtype == jnp.float32 else 2**-8
    near(actual, want, rate)
    g = draw(actual.shape, 2, dtype).astype(actual.dtype)
    left, right, out = equation.replace("->", ",").split(",")
    dx, dy = back(g)
    assert dx.dtype == dy.dtype == dtype
    rate = 1e-6 if dtype == jnp.float32 else 2**-8
    near(dx, np.einsum(f"{out},{right}->{left}", *wide(g, y)), rate)
    near(dy, np.einsum(f"{left},{out}->{right}", *wide(x, g)), rate)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 5, 8), (2, 3, 5, 8)])
def test_a_table_scores_features_of_any_shape(shape, dtype):
    """And has a gradient, as where the output table is tuned."""
    x, table = draw(shape, 0, dtype), draw((7, 8), 1, dtype)
    actual, back = jax.vjp(jax.jit(score_table), x, table)
    g = draw((*shape[:-1], 7), 2, jnp.float32)
    dx, dy = back(g)
    x, table, g = wide(x, table, g)
    want = x @ table.T, g @ table, g.reshape(-1, 7).T @ x.reshape(-1, 8)
    assert actual.dtype == jnp.float32 and dx.dtype == dy.dtype == dtype
    rate = 1e-6 if dtype == jnp.float32 else 2**-7
    for a, b in zip(wide(actual, dx, dy), want, strict=True):
        np.testing.assert_allclose(a, b, atol=rate * np.abs(b).max())


@pytest.mark.long_cases("float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dense_layers_are_flaxs(dtype):
    x = draw((2, 5, 3, 4), 0, dtype)
    for axis, features in ((-1, 7), ((-2, -1), 6), (-1, (2, 3))):
        ours, theirs = (
            nn.DenseGeneral(features, axis=axis, dtype=dtype, dot_general=how)
            for how in (dot_general, None)
        )
        weights = theirs.init(jax.random.key(0), x)
        actual, want = ours.apply(weights, x), theirs.apply(weights, x)
        assert actual.dtype == want.dtype == dtype
        np.testing.assert_allclose(*wide(actual, want), rtol=2**-6, atol=2**-6)


def test_a_frozen_side_is_not_kept():
    """What a product keeps for the backward pass: of a frozen kernel its rows are not needed."""
    x, kernel = draw((4, 8), 0, jnp.bfloat16), draw((8, 16), 1, jnp.bfloat16)
    residuals = lambda x: jax.tree.leaves(jax.vjp(lambda x: einsum("tw,wf->tf", x, kernel), x)[1])
    assert (4, 8) not in [leaf.shape for leaf in residuals(x)]


def test_layers_in_a_loop_and_runs_side_by_side():
    """The gradient of a scan under vmap, as grids of runs take it."""
    kernels, x = draw((3, 8, 8), 0, jnp.float32), draw((2, 5, 8), 1, jnp.float32)

    def run(dtype, kernels, x):
        layer = lambda x, kernel: (jnp.tanh(einsum("tw,wf->tf", x, kernel)), None)
        return jax.lax.scan(layer, x.astype(dtype), kernels.astype(dtype))[0].sum(dtype=jnp.float32)

    grads = [
        jax.jit(jax.vmap(jax.grad(lambda k, x, d=d: run(d, k, x)), (None, 0)))(kernels, x)
        for d in (jnp.float32, jnp.bfloat16)
    ]
    np.testing.assert_allclose(*grads, atol=0.03 * float(jnp.abs(grads[0]).max()))
