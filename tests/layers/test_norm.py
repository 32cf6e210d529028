"""LayerNorm against torch's, with its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close

from jaxprompt.layers.norm import LayerNorm, normalize

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
    for found, leaf in zip(pull(jnp.asarray(G)), leaves, strict=True):
        assert_close(found, leaf.grad.numpy())


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
