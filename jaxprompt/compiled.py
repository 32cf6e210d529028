"""Compilation of train steps."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def jit(function: Callable, *, dropped: bool = True, **settings: Any) -> Callable:
    """Compiles like jax.jit. On the CPU XLA leaves its fusion emitters out of what has dropout:
    there they take hundreds of MiB to compile and the step is no faster for them.
    """
    return jax.jit(function, compiler_options=_options(dropped), **settings)


@functools.cache
def _options(dropped: bool) -> dict[str, Any] | None:
    if jax.default_backend() != "cpu" or not dropped:
        return None
    options = {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:  # an XLA that has no such option
        return None
    return options
