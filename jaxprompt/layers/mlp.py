"""The feed-forward block and its activations."""

import jax
import jax.numpy as jnp
from flax import linen as nn


@jax.custom_vjp
def gelu(x):
    """Computes x * Phi(x), Phi the exact normal (Hendrycks & Gimpel 2016). [...] -> [...]"""
    return _gelu_and_slope(x)[0]


def _gelu_and_slope(x):
    wide = x.astype(jnp.float32)
    cdf = 0.5 + 0.5 * jax.lax.erf(wide * 2**-0.5)
    slope = cdf + wide * jnp.exp(-0.5 * wide * wide) * (2 * jnp.pi) ** -0.5
    return (wide * cdf).astype(x.dtype), slope.astype(x.dtype)


# One array is kept for the backward pass, the slope: automatic differentiation keeps three.
gelu.defvjp(_gelu_and_slope, lambda slope, g: (g * slope,))

ACTIVATIONS = {
    "gelu": gelu,
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


class Mlp(nn.Module):
    """Two linear maps with an activation between. [..., H] -> [..., F] -> [..., H]"""

    hidden: int
    activation: str = "gelu"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        """Applies both maps."""
        width = x.shape[-1]
        x = nn.Dense(self.hidden, dtype=self.dtype, name="up")(x)
        x = ACTIVATIONS[self.activation](x)
        return nn.Dense(width, dtype=self.dtype, name="down")(x)
