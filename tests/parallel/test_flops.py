"""FLOPs of traced functions against counts by hand."""

import jax
import jax.numpy as jnp
import pytest

from jaxprompt.parallel.flops import count_flops

A, B = jax.ShapeDtypeStruct((2, 3, 5), "float32"), jax.ShapeDtypeStruct((2, 5, 7), "float32")
ONE = 2 * (2 * 3 * 7) * 5  # a multiplication and an addition for each number summed


def product(a, b):
    return jnp.einsum("nij,njk->nik", a, b)


def loop(a, b):
    return jax.lax.scan(lambda total, x: (total + product(a, b), x), jnp.zeros((2, 3, 7)), None, 11)


def branches(a, b):
    twice = lambda: product(a, b) + product(a + 1, b)
    return jax.lax.cond(a.sum() > 0, twice, lambda: product(a, b))


@jax.custom_vjp
def custom(a, b):
    return product(a, b)


custom.defvjp(lambda a, b: (custom(a, b), ()), lambda residuals, cotangent: (None, None))


@pytest.mark.parametrize(
    "function, times",
    [
        (product, 1), (jax.jit(product), 1), (jax.checkpoint(product), 1), (loop, 11),
        (branches, 2), (custom, 1), (lambda a, b: a + 1, 0),
    ],
)  # fmt: skip
def test_products_are_counted(function, times):
    assert count_flops(function, A, B) == times * ONE


def test_iterations_of_a_while_loop_are_an_argument():
    step = lambda total: total + product(jnp.ones(A.shape), jnp.ones(B.shape))
    run = lambda: jax.lax.while_loop(lambda total: total.sum() < 9, step, jnp.zeros((2, 3, 7)))
    assert count_flops(run) == ONE and count_flops(run, while_steps=5) == 5 * ONE


def test_the_count_is_that_of_the_compiled_program():
    weights = jnp.ones((4, 6, 6))

    def layers(x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    x = jnp.ones((8, 6))
    compiled = jax.jit(jax.vmap(lambda x: jnp.tanh(x @ weights[0]))).lower(x).compile()
    assert count_flops(layers, x) == 4 * 2 * 8 * 6 * 6
    assert compiled.cost_analysis()["flops"] >= count_flops(lambda x: x @ weights[0], x)
