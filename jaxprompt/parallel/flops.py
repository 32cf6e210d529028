"""Counts the FLOPs of a function's matrix products, before compilation."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax


def count_flops(function: Callable[..., Any], *args: Any) -> float:
    """Counts the floating-point operations of a function's matrix products.

    `args` are arrays or their shapes. A loop body counts once per iteration; of
    several branches the most expensive one counts.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Any) -> float:
    # jax.experimental.roofline counts the body of a loop once, however often it runs.
    total = 0.0
    for line in jaxpr.eqns:
        if line.primitive.name == "dot_general":
            (contracted, _), _ = line.params["dimension_numbers"]
            left = line.invars[0].aval.shape
            summed = math.prod(left[axis] for axis in contracted)
            total += 2.0 * math.prod(line.outvars[0].aval.shape) * summed
        parts = [_count(part) for part in _inner(line.params)]
        pick = max if line.primitive.name == "cond" else sum
        # A scan has a length. A while loop, of which nobody knows how often it runs, counts once.
        total += line.params.get("length", 1) * pick(parts or [0.0])
    return total


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """Yields the inner programs of an operation."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one
