"""Recomputation against the function itself, and what is frozen in it."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt.layers.recompute import recompute


def test_gradients_are_those_of_the_function():
    function = lambda x, more: (jnp.sin(x) * more["w"], more["ids"] + 1)

    def loss(x, w, wrap):
        y, ids = wrap(x, {"w": w, "ids": jnp.arange(3)})
        return (y * ids).sum()

    x, w = jnp.arange(3.0), jnp.array([1.0, -2.0, 0.5])
    for argnums in (0, 1, (0, 1)):
        grad = lambda wrap, argnums=argnums: jax.grad(
            jax.checkpoint(loss, static_argnums=2), argnums
        )(x, w, wrap)
        actual, expected = grad(lambda *args: recompute(function, *args)), grad(function)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_what_is_frozen_outside_is_frozen_inside():
    seen = []

    @jax.custom_vjp
    def multiply(x, w):
        return x * w

    def forward(x, w):
        seen.append((x.perturbed, w.perturbed))
        return x.value * w.value, w.value

    multiply.defvjp(forward, lambda w, g: (g * w, None), symbolic_zeros=True)
    jax.grad(lambda x: recompute(multiply, x, jnp.ones(2)).sum())(jnp.ones(2))
    assert seen[-1] == (True, False)
