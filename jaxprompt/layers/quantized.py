"""Frozen matrices in 8 or 4 bits: blocks of 32 values along a product's input axis.

A value is code x scale + minimum of its block, as in GGUF's Q4_1. A quantised leaf is a dict with
the arrays of `PLANES` instead of one array. They have the axes of the original array, but the input
axis is shorter: 1/32 of it in `scale` and `minimum`, and 1/2 of it in `codes` of 4 bits, where
a byte contains values i (low bits) and i + 16 of a block.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxprompt.errors import InputError
from jaxprompt.layers.product import einsum
from jaxprompt.layers.recompute import recompute
from jaxprompt.tree import BLOCK
from jaxprompt.types import Array

BITS = {"int8": 8, "int4": 4}
PLANES = ("codes", "scale", "minimum")
DTYPES = {"codes": jnp.uint8, "scale": jnp.float16, "minimum": jnp.float16}
# The axis that a product sums over, the last one of several; a stack has the axis of layers first.
_STACKED = r"(layers|decoder_layers|later_layers)/(.*/)?"
_INPUTS = (
    (_STACKED + r"(attention|cross)/((position_)?(query|key|value)|in_proj)/kernel", 1),
    (_STACKED + r"(attention|cross)/out/kernel", 2),
    (_STACKED + r"mlp/(up|gate|down)/kernel", 1),
    (r"(embed/word|lm)/table", 1),
)


def input_axis(name: str) -> int | None:
    """Returns the axis of a backbone's parameter that blocks are along; None = not quantised."""
    return next((axis for rule, axis in _INPUTS if re.fullmatch(rule, name)), None)


def plane_shape(shape: tuple[int, ...], axis: int, plane: str, bits: int) -> tuple[int, ...]:
    """Returns the shape of one of the `PLANES` of an array with this shape."""
    values_per_entry = 8 // bits if plane == "codes" else BLOCK
    return (*shape[:axis], shape[axis] // values_per_entry, *shape[axis + 1 :])


def check_blocks(name: str, size: int, kind: str) -> None:
    """Raises InputError if the block size does not divide the quantised axis of a parameter."""
    if size % BLOCK:
        raise InputError(
            f"backbone.quantize={kind} needs an input axis divisible by {BLOCK}, but the last "
            f"input axis of {name} has size {size}; use backbone.quantize=none"
        )


def quantized_shapes(shapes: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns the leaves of a backbone's flat tree after quantisation.

    `shapes` are arrays or jax.ShapeDtypeStruct by name, with the prefix "backbone/"; `kind` is one
    of BITS.

    Raises:
      InputError: if the block size does not divide an axis.
    """
    quantized: dict[str, Any] = {}
    for name, leaf in shapes.items():
        axis = input_axis(name.partition("/")[2])
        if axis is None:
            quantized[name] = leaf
            continue
        check_blocks(name, leaf.shape[axis], kind)
        for plane in PLANES:
            shape = plane_shape(leaf.shape, axis, plane, BITS[kind])
            quantized[f"{name}/{plane}"] = jax.ShapeDtypeStruct(shape, DTYPES[plane])
    return quantized


def is_quantized(leaf: Any) -> bool:
    """Returns whether a node of a tree of parameters is a quantised leaf."""
    return isinstance(leaf, Mapping) and "codes" in leaf


def has_quantized(params: Any) -> bool:
    """Returns whether a tree of parameters has a quantised leaf."""
    if not isinstance(params, Mapping):
        return False
    return is_quantized(params) or any(map(has_quantized, params.values()))


def dequantize_tree(params: Any, dtype: Any) -> Any:
    """Dequantises the leaves of a nested dict."""
    if is_quantized(params):
        return dequantize(**params, dtype=dtype)
    if isinstance(params, Mapping):
        return {name: dequantize_tree(value, dtype) for name, value in params.items()}
    return params


def dequantize_layer(params: Any, x: Array) -> Any:
    """Dequantises the leaves of one layer to x's dtype, but not before x is available.

    Otherwise a compiler might do so once before a loop over tokens, for all layers together. There
    is no gradient through it.
    """
    if not has_quantized(params):
        return params
    return dequantize_tree(jax.lax.optimization_barrier((params, x))[0], x.dtype)


def dequantize(codes: Array, scale: Array, minimum: Array, dtype: Any) -> Array:
    """Computes codes x scale + minimum in float32, then casts. Returns the original shape."""
    return _dequantize_p.bind(codes, scale, minimum, dtype=jnp.dtype(dtype))


def _dequantized_values(codes, scale, minimum, *, dtype):
    axis = next(i for i, n in enumerate(scale.shape) if n != codes.shape[i])

    def split_blocks(x, block_size):
        return x.reshape(*x.shape[:axis], -1, block_size, *x.shape[axis + 1 :])

    block_size = codes.shape[axis] // scale.shape[axis]
    blocks = split_blocks(codes, block_size)
    if block_size < BLOCK:
        blocks = jnp.concatenate([blocks & 15, blocks >> 4], axis=axis + 1)
    scale, minimum = (split_blocks(x, 1).astype(jnp.float32) for x in (scale, minimum))
    values = (blocks.astype(jnp.float32) * scale + minimum).astype(dtype)
    return values.reshape(*codes.shape[:axis], -1, *codes.shape[axis + 1 :])


# A primitive: the backward pass must store neither the result nor intermediate values, and the
# policy of a checkpoint only knows the names of primitives (stack.py). It has no derivative, so
# that training a quantized weight is an error.
_dequantize_p = Primitive("dequantize")
_dequantize_p.def_impl(jax.jit(_dequantized_values, static_argnames="dtype"))
mlir.register_lowering(_dequantize_p, mlir.lower_fun(_dequantized_values, multiple_results=False))


@_dequantize_p.def_abstract_eval
def _abstract_eval(codes, scale, minimum, *, dtype):
    compute = functools.partial(_dequantized_values, dtype=dtype)
    result = jax.eval_shape(compute, codes, scale, minimum)
    return jax.core.ShapedArray(result.shape, result.dtype)


def _batching_rule(args, axes, *, dtype):
    compute = functools.partial(_dequantized_values, dtype=dtype)
    return jax.vmap(compute, in_axes=tuple(axes))(*args), 0


batching.primitive_batchers[_dequantize_p] = _batching_rule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTable:
    """A quantised lookup table that is used like an array [V, E]."""

    codes: Array
    scale: Array
    minimum: Array
    dtype: Any = dataclasses.field(metadata=dict(static=True))  # of the looked-up vectors
    factor: float = dataclasses.field(
        default=1.0, metadata=dict(static=True)
    )  # multiplies every value

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self.scale.shape[0], self.scale.shape[1] * BLOCK

    def __len__(self) -> int:
        return len(self.scale)

    def __getitem__(self, ids):
        """Looks rows up. int [...] -> [..., E]"""
        rows = self.codes[ids], self.scale[ids], self.minimum[ids]
        return self._multiply(dequantize(*rows, self.dtype))

    def astype(self, dtype):
        """Returns the whole table. -> [V, E]"""
        return self._multiply(dequantize(self.codes, self.scale, self.minimum, dtype))

    def __mul__(self, factor: float) -> "QuantizedTable":
        """Returns a table whose values are multiplied when they are looked up."""
        return dataclasses.replace(self, factor=self.factor * factor)

    def _multiply(self, x):
        # Not the scales of blocks, which are float16 and would be rounded again.
        return x if self.factor == 1.0 else x * jnp.asarray(self.factor, x.dtype)


Table = QuantizedTable | Array


def scale_table(table: Table, scale: float) -> Table:
    """Multiplies a table; a quantised one is multiplied when it is looked up. -> [V, E]"""
    if scale == 1.0:
        return table
    if not isinstance(table, QuantizedTable):
        return table * jnp.asarray(scale, table.dtype)
    return table * scale


def score_table(features: Array, table: Table) -> Array:
    """Multiplies features by every row of a table. [..., E], [V, E] -> float32 [..., V]

    A quantised table is dequantised again in the backward pass. It has no gradient.
    """

    def score(x, table):
        return einsum("...x,vx->...v", x, table.astype(x.dtype), jnp.float32)

    if not isinstance(table, QuantizedTable):
        return score(features, table)
    return recompute(lambda x, t: score(x, jax.lax.stop_gradient(t)), features, table)


def as_table(table: Array | Mapping[str, Array], dtype: Any) -> Table:
    """Returns a table from a parameter that may be quantised."""
    return QuantizedTable(**table, dtype=jnp.dtype(dtype)) if is_quantized(table) else table
