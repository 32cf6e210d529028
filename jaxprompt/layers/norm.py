"""Norms that store one array for the backward pass. They compute in float32."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def normalize(x, scale, bias, eps: float):
    """Computes (x - mean) / sqrt(variance + eps) * scale + bias in float32. [..., H] -> [..., H]"""
    return _normalize_forward(x, scale, bias, eps)[0]


def _normalize_forward(x, scale, bias, eps):
    wide = x.astype(jnp.float32)
    # Two passes: mean(x^2) - mean(x)^2, flax's faster formula, cancels if the mean is large.
    centred = wide - wide.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps)  # [..., 1]
    unit = centred * inverse
    y = unit * scale.astype(jnp.float32) + bias.astype(jnp.float32)
    # `inverse` has one value per row, so it stays in float32.
    return y.astype(x.dtype), (unit.astype(x.dtype), inverse, scale, bias)


def _normalize_backward(eps, residuals, g):
    unit, inverse, scale, bias = residuals
    unit, grad = unit.astype(jnp.float32), g.astype(jnp.float32)
    scaled_grad = grad * scale.astype(jnp.float32)
    projection = (scaled_grad * unit).mean(-1, keepdims=True)
    dx = inverse * (scaled_grad - scaled_grad.mean(-1, keepdims=True) - unit * projection)
    batch_axes = tuple(range(g.ndim - 1))
    # For a frozen scale and bias the compiler removes these sums.
    dscale, dbias = (grad * unit).sum(batch_axes), grad.sum(batch_axes)
    return dx.astype(g.dtype), dscale.astype(scale.dtype), dbias.astype(bias.dtype)


# Automatic differentiation stores four arrays as large as x, and a stack stores them per layer.
normalize.defvjp(_normalize_forward, _normalize_backward)


class LayerNorm(nn.Module):
    """Normalises the last axis (Ba et al. 2016). [..., H] -> [..., H]"""

    eps: float
    use_bias: bool = True

    @nn.compact
    def __call__(self, x):
        """Normalises."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        else:
            bias = jnp.zeros(x.shape[-1:])
        return normalize(x, scale, bias, self.eps)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_normalize(x, scale, eps: float):
    """Computes x / sqrt(mean(x^2) + eps) * scale in float32. [..., H] -> [..., H]"""
    return _rms_forward(x, scale, eps)[0]


def _rms_forward(x, scale, eps):
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)  # [..., 1]
    unit = wide * inverse
    y = unit * scale.astype(jnp.float32)
    return y.astype(x.dtype), (unit.astype(x.dtype), inverse, scale)


def _rms_backward(eps, residuals, g):
    unit, inverse, scale = residuals
    unit, grad = unit.astype(jnp.float32), g.astype(jnp.float32)
    scaled_grad = grad * scale.astype(jnp.float32)
    dx = inverse * (scaled_grad - unit * (scaled_grad * unit).mean(-1, keepdims=True))
    dscale = (grad * unit).sum(tuple(range(g.ndim - 1)))
    return dx.astype(g.dtype), dscale.astype(scale.dtype)


rms_normalize.defvjp(_rms_forward, _rms_backward)


class RMSNorm(nn.Module):
    """Divides by the root mean square (Zhang & Sennrich 2019). [..., H] -> [..., H]

    The result is multiplied by `offset` + the scale: by 1 + w in Gemma.
    """

    eps: float
    offset: float = 0.0
    axes: int = 1  # the number of last axes, over all of which it normalises: [..., N, D]

    @nn.compact
    def __call__(self, x):
        """Normalises."""
        shape = x.shape
        if self.axes > 1:
            x = x.reshape(*shape[: -self.axes], math.prod(shape[-self.axes :]))
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        # In float32, as transformers' Gemma: in bfloat16 1 + w would lose most of w.
        scale = scale.astype(jnp.float32) + self.offset if self.offset else scale
        return rms_normalize(x, scale, self.eps).reshape(shape)
