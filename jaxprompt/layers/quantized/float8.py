"""Products of frozen matrices in float8, on GPUs that have units for it.

A matrix is stored as float8_e4m3fn with one scale per output. Its inputs are cast to float8_e4m3fn,
and in the backward pass the gradients to float8_e5m2, whose range is wider; each array has one
scale, by which its largest magnitude is the dtype's largest (Micikevicius et al. 2022, sections 3
and 4; there scales of earlier steps are used, which have no overflow of their own but need state).
Sums are float32.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from jaxprompt.errors import InputError
from jaxprompt.layers.product import ScaledMatrix, einsum
from jaxprompt.parallel.sharding import Target, current_target
from jaxprompt.types import Array

CODES = jnp.dtype(jnp.float8_e4m3fn)
_GRADS = jnp.dtype(jnp.float8_e5m2)
_CAPABILITY = 8.9  # of NVIDIA's first GPUs with float8 units


def check_target(target: Target) -> None:
    """Raises InputError for accelerators without float8 units. CPUs emulate them."""
    if target.platform == "cpu" or target.platform == "gpu" and target.capability >= _CAPABILITY:
        return
    device = f"a GPU of capability {target.capability}" if target.platform == "gpu" else "a TPU"
    raise InputError(
        f"backbone.quantize=fp8 needs a GPU with float8 units (capability {_CAPABILITY} or more, "
        f"e.g. H100), but this is {device}; use backbone.quantize=none or int8"
    )


class Float8Matrix(ScaledMatrix):
    """Values in float8_e4m3fn with one scale per output of the product."""

    def einsum(self, equation: str, x, dtype: Any):
        """Computes `product.einsum`: of a dense layer in float8, else with the values."""
        check_target(current_target())
        left, right, result = re.split(",|->", equation)
        num_inputs = sum(letter not in result for letter in right)
        inputs, outputs = right[:num_inputs], right[num_inputs:]
        if not inputs or not left.endswith(inputs) or result != left.removesuffix(inputs) + outputs:
            return einsum(equation, x, self.values(x.dtype), dtype)
        return _dense(num_inputs, dtype, x, self.codes, self.scale)


def _cast(x, dtype) -> tuple[Array, Array]:
    """Casts an array to float8. Returns the values and the scale that they are divided by."""
    limit = jnp.finfo(dtype).max.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x)).astype(jnp.float32) / limit
    scale = jnp.where(scale > 0, scale, 1.0)
    # Clipped, because a quotient can be rounded up: e4m3fn has no infinity, and gives NaN.
    return jnp.clip(x.astype(jnp.float32) / scale, -limit, limit).astype(dtype), scale


def _multiply(x, y, axes: tuple[int, int]) -> Array:
    """Sums the products of two matrices over these axes in float32."""
    if current_target().platform == "cpu":  # float8 values and their products are exact in float32
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dense(num_inputs, dtype, x, codes, scale):
    """Multiplies the last axes of x by the first ones of a matrix. [..., K...] -> [..., N...]"""
    shape = codes.shape[num_inputs:]
    size = math.prod(shape)
    rows, rows_scale = _cast(x.reshape(-1, codes.size // size), CODES)
    y = _multiply(rows, codes.reshape(-1, size), (1, 0)) * rows_scale
    # XLA's kernels for GPUs multiply by one scale, not by one per column: without this cast they
    # would write float32.
    y = (y.astype(dtype) * scale.reshape(1, size)).astype(dtype)
    return y.reshape(*x.shape[: x.ndim - num_inputs], *shape)


def _forward(num_inputs, dtype, x, codes, scale):
    # The empty array has the dtype of x.
    return _dense(num_inputs, dtype, x, codes, scale), (codes, scale, jnp.zeros(0, x.dtype))


def _backward(num_inputs, dtype, residuals, g):
    codes, scale, empty_x = residuals
    inputs, size = codes.shape[:num_inputs], math.prod(codes.shape[num_inputs:])
    # The scales of outputs belong to the axis that is summed.
    grads = g.reshape(-1, size).astype(jnp.float32) * scale.reshape(1, size)
    grads, grads_scale = _cast(grads, _GRADS)
    dx = _multiply(grads, codes.reshape(-1, size), (1, 1)) * grads_scale
    batch_shape = g.shape[: g.ndim - (codes.ndim - num_inputs)]
    return dx.astype(empty_x.dtype).reshape(*batch_shape, *inputs), None, None


_dense.defvjp(_forward, _backward)
