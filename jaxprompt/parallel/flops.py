"""Counts the FLOPs of a function's matrix products, before compilation."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax


def count_flops(function: Callable[..., Any], *args: Any, while_steps: int = 1) -> float:
    """Counts the floating-point operations of a function's matrix products.

    `args` are arrays or their shapes. A loop body counts once per iteration; of
    several branches the most expensive one counts. `while_steps` is the number of iterations of a
    while loop, which its program does not contain.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr, while_steps)


def _count(jaxpr: Any, while_steps: int) -> float:
    # jax.experimental.roofline counts the body of a loop once, however often it runs.
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            contracted_size = math.prod(left[axis] for axis in contracted)
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * contracted_size
        inner_counts = [_count(inner, while_steps) for inner in _inner(equation.params)]
        pick = max if equation.primitive.name == "cond" else sum
        steps = while_steps if equation.primitive.name == "while" else 1
        total += equation.params.get("length", steps) * pick(inner_counts or [0.0])
    return total


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """Yields the inner programs of an operation."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item
