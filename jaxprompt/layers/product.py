"""Products of two arrays in 16 bits, forward and backward.

The gradient of a float32 result would widen both sides of the products behind it; here it is cast
first. XLA's kernels for a CPU's bfloat16 units sum in float32 and give float32: a product that
asks for bfloat16, or has one side widened, is computed in float32 at less than half the speed. So
there such a product gives float32 and is cast.
"""

import functools
import re
import string

import jax
import jax.numpy as jnp

from jaxprompt.parallel.sharding import current_target


def _is_narrow(x, y) -> bool:
    return x.dtype == y.dtype and x.dtype.itemsize == 2


def _is_slow(x) -> bool:
    return x.dtype == jnp.bfloat16 and current_target().platform == "cpu"


def einsum(equation: str, x, y, dtype=None):
    """Computes jnp.einsum of two arrays in which every letter occurs twice. `dtype` None = x's

    Only x may begin with "...", and the result then does too.
    """
    if equation.startswith("..."):  # as letters, which `_narrow` can put into another order
        named = equation.index(",") - len("...")
        equation = equation.replace("...", string.ascii_uppercase[: x.ndim - named])
    if _is_narrow(x, y):
        return _narrow(equation, jnp.dtype(dtype or x.dtype), x, y)
    return jnp.einsum(equation, x, y, preferred_element_type=dtype)


def dot_general(x, kernel, dimensions, precision=None, *, dtype=None, **how):
    """Computes lax.dot_general as flax's dense layers call it: last axes of x, first of a kernel

    `dtype` is that of the result, None = x's.
    """
    if dtype is None and not (_is_narrow(x, kernel) and _is_slow(x)):
        return jax.lax.dot_general(x, kernel, dimensions, precision, **how)
    rows = x.ndim - len(dimensions[0][0])
    letters = string.ascii_lowercase[: rows + kernel.ndim]
    result = letters[:rows] + letters[x.ndim :]
    return einsum(f"{letters[: x.ndim]},{letters[rows:]}->{result}", x, kernel, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _narrow(equation, dtype, x, y):
    if not _is_slow(x):
        return jnp.einsum(equation, x, y, preferred_element_type=dtype)
    left, right, result = re.split(",|->", equation)
    order = sorted(left, key=lambda letter: letter not in result)  # what is summed over comes last
    if order != list(left):
        # The kernels want it there. XLA would take the transposition into the product again, and
        # then has no kernel for it at all.
        x = jax.lax.optimization_barrier(x.transpose([left.index(letter) for letter in order]))
    equation = f"{''.join(order)},{right}->{result}"
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32).astype(dtype)


def _forward(equation, dtype, x, y):
    # A side is kept where the other one has a gradient: a frozen weight has none.
    kept = x.value if y.perturbed else None, y.value if x.perturbed else None
    return _narrow(equation, dtype, x.value, y.value), (*kept, jnp.zeros(0, x.value.dtype))


def _backward(equation, dtype, kept, g):
    (x, y, like), (left, right, result) = kept, re.split(",|->", equation)
    g = jnp.zeros(g.shape, g.dtype) if isinstance(g, jax.custom_derivatives.SymbolicZero) else g
    # `like` is empty and tells the type of x, which may not have been kept.
    g, narrow = g.astype(like.dtype), like.dtype
    dx = None if y is None else _narrow(f"{result},{right}->{left}", narrow, g, y)
    dy = None if x is None else _narrow(f"{left},{result}->{right}", narrow, x, g)
    return dx, dy


_narrow.defvjp(_forward, _backward, symbolic_zeros=True)
