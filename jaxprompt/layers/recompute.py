"""What the backward pass computes again, so that the results between are not kept for it."""

import functools
from collections.abc import Callable

import jax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recompute(function: Callable, *arrays):
    """Computes a function of arrays, and for the backward pass once more from these alone.

    Unlike jax.checkpoint's, this holds inside another jax.checkpoint too: there a policy that keeps
    results keeps copies of the arrays for each one inside.
    """
    return function(*arrays)


def _backward(function, arrays, given):
    # Without a loop between them, what is computed twice would be merged, and kept.
    arrays = jax.lax.optimization_barrier(arrays)
    return jax.vjp(function, *arrays)[1](given)


recompute.defvjp(lambda function, *arrays: (function(*arrays), arrays), _backward)
