"""Recomputation in the backward pass, so that intermediate results are not stored."""

import functools
from collections.abc import Callable

import jax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recompute(function: Callable, *arrays):
    """Computes a function of arrays, and computes it again in the backward pass.

    Unlike jax.checkpoint, this also works inside another jax.checkpoint: there, a policy that saves
    results would save copies of the arrays for each nested one.
    """
    return function(*arrays)


def _backward(function, arrays, grads):
    # Otherwise the compiler would merge both computations and store the results.
    arrays = jax.lax.optimization_barrier(arrays)
    return jax.vjp(function, *arrays)[1](grads)


recompute.defvjp(lambda function, *arrays: (function(*arrays), arrays), _backward)
