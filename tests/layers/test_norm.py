"""LayerNorm and RMSNorm against torch's, with their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close

from jaxprompt.layers.norm import LayerNorm, RMSNorm, normalize, rms_normalize

RNG = np.random.default_rng(0)
X = (3 + 5 * RNG.normal(size=(2, 3, 16))).astype(np.float32)
SCALE, BIAS = RNG.normal(size=(2, 16)).astype(np.float32)
G = RNG.normal(size=X.shape).astype(np.float32)


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.1])
def test_values_and_gradients_are_torchs(eps):
    torch = pytest.importorskip("torch")
    leaves = [torch.tensor(x, requires_grad=True) for x in (X, SCALE, BIAS)]
    theirs = torch.nn.functional.layer_norm(leaves[0], (16,), leaves[1], leaves[2], eps)
    theirs.backward(torch.tensor(G))
    ours, pull = jax.vjp(lambda *a: normalize(*a, eps), X, SCALE, BIAS)
    assert_close(ours, theirs.detach().numpy())
    for actual, leaf in zip(pull(jnp.asarray(G)), leaves, strict=True):
        assert_close(actual, leaf.grad.numpy())


def test_gradients_keep_the_dtype_of_their_arguments():
    x = jnp.asarray(X, jnp.bfloat16)
    y, pull = jax.vjp(lambda *a: normalize(*a, 1e-5), x, SCALE, jnp.asarray(BIAS, jnp.bfloat16))
    dx, dscale, dbias = pull(y)
    assert y.dtype == dx.dtype == dbias.dtype == jnp.bfloat16
    assert dscale.dtype == jnp.float32
    wide = normalize(X, SCALE, BIAS, 1e-5)
    assert np.abs(np.asarray(y, np.float32) - wide).max() < 0.05


def test_module_starts_at_the_plain_normal_form():
    module = LayerNorm(1e-5)
    y = module.apply(module.init(jax.random.key(0), X), X)
    assert np.abs(y.mean(-1)).max() < 1e-5
    assert np.abs(y.std(-1) - 1).max() < 1e-4


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 0.1])
def test_root_mean_square_norm_is_torchs(eps):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    torch = pytest.importorskip("torch")
    theirs = t5.T5LayerNorm(16, eps)
    theirs.weight.data = torch.tensor(SCALE)
    x = torch.tensor(X, requires_grad=True)
    y = theirs(x)
    y.backward(torch.tensor(G))
    ours, pull = jax.vjp(lambda *a: rms_normalize(*a, eps), X, SCALE)
    assert_close(ours, y.detach().numpy(), rtol=1e-6)
    dx, dscale = pull(jnp.asarray(G))
    assert_close(dx, x.grad.numpy())
    assert_close(dscale, theirs.weight.grad.numpy())
    actual = RMSNorm(eps).apply({"params": {"scale": SCALE}}, X)
    assert_close(actual, ours, rtol=0)


def test_root_mean_square_norm_in_bfloat16_is_the_rounded_float32():
    x, scale, g = (jnp.asarray(a, jnp.bfloat16) for a in (X * 1e3, SCALE, G))
    y, pull = jax.vjp(lambda *a: rms_normalize(*a, 1e-6), x, scale)
    plain = lambda x, scale: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale
    wide, pull_wide = jax.vjp(plain, x.astype(jnp.float32), scale.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, wide.astype(jnp.bfloat16))
    for actual, expected in zip(pull(g), pull_wide(g.astype(jnp.float32)), strict=True):
        assert actual.dtype == jnp.bfloat16
        assert_close(actual.astype(jnp.float32), expected, rtol=0.01)


def test_root_mean_square_norm_keeps_one_wide_array():
    _, backward = jax.vjp(lambda x: rms_normalize(x, SCALE, 1e-6), jnp.asarray(X))
    leaves = jax.tree.leaves(backward)
    assert sum(getattr(leaf, "size", 0) == X.size for leaf in leaves) == 1


def test_a_divided_stream_has_the_same_norm():
    """With eps divided by the square of the factor: what T5's rescale rests on."""
    assert_close(rms_normalize(X / 100, SCALE, 1e-6 / 100**2), rms_normalize(X, SCALE, 1e-6), 1e-6)
