"""Activations and the feed-forward block against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, fill

from jaxprompt.layers.mlp import ACTIVATIONS, Mlp, gelu

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
X = np.linspace(-9, 9, 1001, dtype=np.float32)
TORCH = {
    "gelu": torch.nn.functional.gelu,
    "gelu_new": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_values_and_slopes_are_torchs(name):
    x = torch.tensor(X, requires_grad=True)
    y = TORCH[name](x)
    y.sum().backward()
    ours = ACTIVATIONS[name]
    np.testing.assert_allclose(jax.jit(ours)(X), y.detach(), atol=2e-6)
    inner = X != 0  # the slope of relu at 0 is a convention
    slopes = jax.jit(jax.vmap(jax.grad(ours)))(X)
    np.testing.assert_allclose(slopes[inner], x.grad.numpy()[inner], atol=5e-6)


def test_gelu_in_bfloat16_is_the_rounded_float32():
    x = jnp.asarray(X, jnp.bfloat16)
    y, slope = gelu(x), jax.grad(lambda x: gelu(x).astype(jnp.float32).sum())(x)
    wide = x.astype(jnp.float32)
    assert y.dtype == slope.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, gelu(wide).astype(jnp.bfloat16))
    exact = jax.vmap(jax.grad(gelu))(wide)
    np.testing.assert_allclose(slope.astype(jnp.float32), exact, rtol=1e-2, atol=1e-6)


def test_gelu_keeps_one_array_for_the_backward_pass():
    _, backward = jax.vjp(gelu, jnp.asarray(X))
    arrays = [leaf for leaf in jax.tree.leaves(backward) if getattr(leaf, "size", 0) == X.size]
    assert len(arrays) == 1


def test_mlp_is_two_maps():
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    module = Mlp(12, "relu")
    params = fill(jax.eval_shape(lambda: module.init(jax.random.key(0), x)["params"]))
    up, down = params["up"], params["down"]
    expected = np.maximum(x @ up["kernel"] + up["bias"], 0) @ down["kernel"] + down["bias"]
    assert_close(module.apply({"params": params}, x), expected)
