"""Recomputation in the backward pass, so that intermediate results are not stored."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero


def instantiate_zeros(grads: Any) -> Any:
    """Makes arrays of symbolic zeros, which jax.custom_vjp passes for results that are not read."""
    is_zero = lambda x: isinstance(x, SymbolicZero)
    fill = lambda x: jnp.zeros(x.shape, x.dtype) if is_zero(x) else x
    return jax.tree.map(fill, grads, is_leaf=is_zero)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recompute(function: Callable, *arrays):
    """Computes a function of arrays, and computes it again in the backward pass.

    Arrays that are frozen are frozen there too, so that a kernel can leave their gradients out.
    Unlike jax.checkpoint, this also works inside another jax.checkpoint: there, a policy that saves
    results would save copies of the arrays for each nested one.
    """
    return function(*arrays)


def _forward(function: Callable, *args: Any):
    leaves, tree = jax.tree.flatten(args, is_leaf=lambda x: hasattr(x, "perturbed"))
    arrays = jax.tree.unflatten(tree, [x.value for x in leaves])
    # Sizes say what trains, because residuals must be arrays.
    trains = [jnp.zeros(int(x.perturbed)) for x in leaves]
    return function(*arrays), (arrays, trains)


def _backward(function: Callable, residuals: Any, grads: Any):
    arrays, trains = residuals
    # Otherwise the compiler would merge both computations and store the results.
    leaves, tree = jax.tree.flatten(jax.lax.optimization_barrier(arrays))
    trainable = {i: leaf for i, leaf in enumerate(leaves) if trains[i].size}

    def compute(trainable: dict[int, Any]):
        arguments = [trainable.get(i, leaf) for i, leaf in enumerate(leaves)]
        return function(*jax.tree.unflatten(tree, arguments))

    (trained,) = jax.vjp(compute, trainable)[1](instantiate_zeros(grads))
    return jax.tree.unflatten(tree, [trained.get(i) for i in range(len(leaves))])


recompute.defvjp(_forward, _backward, symbolic_zeros=True)
