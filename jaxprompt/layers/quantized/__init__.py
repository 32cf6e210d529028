"""Frozen matrices in 8 or 4 bits, which products read as they are stored.

A quantised leaf is a dict of arrays, its planes, instead of one array:

- int8: `codes` (int8) and one `scale` (float32) per output of the product: a column of a kernel, a
  row of a table. A value is code x scale, and the scale is applied to the product's result.
- fp8: the same with float8 codes (layers/quantized/float8.py). Tables stay as they are.
- int4, and int8 of a GGUF file: blocks of 32 values along the input axis, as in GGUF's Q4_1. A
  value is code (uint8) x scale + minimum of its block (float16). A byte of 4-bit codes contains
  values i (low bits) and i + 16 of a block.

Planes have the axes of the original array. An axis is 1 in a scale per output if it is an input
axis; blocks divide the last input axis by 32, or by 2 in codes of 4 bits.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxprompt.data.text.gguf_header import is_gguf
from jaxprompt.errors import InputError
from jaxprompt.layers.product import ScaledMatrix, StoredMatrix, cast_matrix, einsum
from jaxprompt.layers.quantized import block_product
from jaxprompt.layers.quantized.float8 import CODES, Float8Matrix
from jaxprompt.layers.recompute import instantiate_zeros, recompute
from jaxprompt.parallel.sharding import current_target
from jaxprompt.tree import BLOCK
from jaxprompt.types import Array

QUANTIZED = ("int8", "int4", "fp8")  # values of backbone.quantize
BLOCK_BITS = {"int4": 4, "int8_blocks": 8}  # the storages with blocks; "int8" has none
_OUTPUT_PLANES = {"codes": jnp.int8, "scale": jnp.float32}
_FLOAT8_PLANES = {"codes": CODES, "scale": jnp.float32}
_BLOCK_PLANES = {"codes": jnp.uint8, "scale": jnp.float16, "minimum": jnp.float16}
# The axes that a product sums over; a stack has the axis of layers first.
_STACKED = r"(layers|decoder_layers|later_layers)/(.*/)?"
_INPUTS = (
    (_STACKED + r"(attention|cross)/((position_)?(query|key|value)|in_proj)/kernel", (1,)),
    (_STACKED + r"(attention|cross)/out/kernel", (1, 2)),
    (_STACKED + r"mlp/(up|gate|down)/kernel", (1,)),
)
_TABLES = ((r"(embed/(decoder_)?word|lm)/table", (1,)),)


def storage_of(quantize: str, path: Any) -> str:
    """Returns how `backbone.quantize` stores the matrices of a checkpoint at this path.

    Returns:
      "none", "int8", "int4", "fp8", or "int8_blocks", whose blocks are those of a GGUF file.
    """
    return "int8_blocks" if quantize == "int8" and is_gguf(path) else quantize


def input_axes(name: str, storage: str) -> tuple[int, ...]:
    """Returns the axes of a backbone's parameter that are summed over; () = not quantised."""
    rules = _INPUTS if storage == "fp8" else _INPUTS + _TABLES
    return next((axes for rule, axes in rules if re.fullmatch(rule, name)), ())


def plane_dtypes(storage: str) -> dict[str, Any]:
    """Returns the planes of a quantised leaf and their dtypes."""
    if storage == "fp8":
        return _FLOAT8_PLANES
    return _BLOCK_PLANES if storage in BLOCK_BITS else _OUTPUT_PLANES


def plane_shape(
    shape: tuple[int, ...], axes: tuple[int, ...], plane: str, storage: str
) -> tuple[int, ...]:
    """Returns the shape of a plane of an array with this shape and these input axes."""
    if storage not in BLOCK_BITS:
        if plane == "codes":
            return shape
        return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    values_per_entry = 8 // BLOCK_BITS[storage] if plane == "codes" else BLOCK
    axis = axes[-1]
    return (*shape[:axis], shape[axis] // values_per_entry, *shape[axis + 1 :])


def check_blocks(name: str, size: int, quantize: str) -> None:
    """Raises InputError if the block size does not divide the quantised axis of a parameter."""
    if size % BLOCK:
        raise InputError(
            f"backbone.quantize={quantize} needs an input axis divisible by {BLOCK}, but the last "
            f"input axis of {name} has size {size}; use backbone.quantize=int8 or none"
        )


def quantized_shapes(shapes: Mapping[str, Any], storage: str) -> dict[str, Any]:
    """Returns the leaves of a backbone's flat tree after quantisation.

    `shapes` are arrays or jax.ShapeDtypeStruct by name, with the prefix "backbone/"; `storage` is
    one of `storage_of`, but not "none".

    Raises:
      InputError: if the block size does not divide an axis.
    """
    quantized: dict[str, Any] = {}
    for name, leaf in shapes.items():
        axes = input_axes(name.partition("/")[2], storage)
        if not axes:
            quantized[name] = leaf
            continue
        if storage in BLOCK_BITS:
            check_blocks(name, leaf.shape[axes[-1]], storage.partition("_")[0])
        for plane, dtype in plane_dtypes(storage).items():
            shape = plane_shape(leaf.shape, axes, plane, storage)
            quantized[f"{name}/{plane}"] = jax.ShapeDtypeStruct(shape, dtype)
    return quantized


def is_quantized(leaf: Any) -> bool:
    """Returns whether a node of a tree of parameters is a quantised leaf."""
    return isinstance(leaf, Mapping) and "codes" in leaf


def has_quantized(params: Any) -> bool:
    """Returns whether a tree of parameters has a quantised leaf."""
    if not isinstance(params, Mapping):
        return False
    return is_quantized(params) or any(map(has_quantized, params.values()))


def as_matrices(params: Any) -> Any:
    """Replaces the quantised leaves of a nested dict by what products read."""
    if isinstance(params, list):
        return [as_matrices(value) for value in params]
    if is_quantized(params):
        if params["codes"].dtype == CODES:
            return Float8Matrix(**params)
        return BlockMatrix(**params) if "minimum" in params else OutputScaledMatrix(**params)
    if isinstance(params, Mapping):
        return {name: as_matrices(value) for name, value in params.items()}
    return params


def as_planes(params: Any) -> Any:
    """Undoes `as_matrices`: matrices are no arguments of JAX's transformations."""
    return jax.tree.map(lambda leaf: vars(leaf) if isinstance(leaf, StoredMatrix) else leaf, params)


def freeze_planes(params: Any) -> Any:
    """Stops the gradients of quantised leaves, which have none."""

    def freeze(node):
        return jax.lax.stop_gradient(node) if is_quantized(node) else node

    return jax.tree.map(freeze, params, is_leaf=is_quantized)


def dequantize_tree(params: Any, dtype: Any) -> Any:
    """Dequantises the leaves of a nested dict, as a reference for the products."""
    if is_quantized(params):
        return as_matrices(params).values(dtype)
    if isinstance(params, Mapping):
        return {name: dequantize_tree(value, dtype) for name, value in params.items()}
    return params


class _DenseProduct:
    """An equation like a dense layer's: the last axes of x times the first of a kernel."""

    def __init__(self, equation: str):
        left, right, self.result = re.split(",|->", equation)
        self.num_inputs = sum(letter not in self.result for letter in right)
        inputs, outputs = right[: self.num_inputs], right[self.num_inputs :]
        fits = left.endswith(inputs) and self.result == left.removesuffix(inputs) + outputs
        self.is_dense = bool(inputs) and fits

    def as_matrix(self, x):
        """Merges the other axes of x. [..., K...] -> [R, K]"""
        return x.reshape(-1, math.prod(x.shape[-self.num_inputs :]))

    def result_shape(self, x, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the product of x and a kernel."""
        return (*x.shape[: -self.num_inputs], *shape[self.num_inputs :])


# -- one scale per output --------------------------------------------------------------------------


class OutputScaledMatrix(ScaledMatrix):
    """Codes in int8 with one scale per output of the product."""

    def einsum(self, equation: str, x, dtype: Any):
        """Computes `product.einsum`; the codes are cast inside of the product."""
        dense = _DenseProduct(equation)
        # A TPU would copy the codes of several heads to merge their axes.
        if not dense.is_dense or current_target().platform != "gpu":
            return _scaled_einsum(equation, dtype, x, self.codes, self.scale)
        # As matrices: with other axes GPUs would multiply by the scale in a kernel of its own.
        size = math.prod(self.shape[dense.num_inputs :])
        codes, scale = self.codes.reshape(-1, size), self.scale.reshape(1, size)
        y = _scaled_einsum("rk,kn->rn", dtype, dense.as_matrix(x), codes, scale)
        return y.reshape(dense.result_shape(x, self.shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scaled_einsum(equation, dtype, x, codes, scale):
    left, right, result = re.split(",|->", equation)
    # The axes with a scale are either all in the result or, in a gradient, all in x.
    scaled = [letter for letter, size in zip(right, scale.shape, strict=True) if size > 1]

    def multiply(array, letters, dtype):
        order = [letter for letter in letters if letter in scaled]
        squeezed = scale.reshape([size for size in scale.shape if size > 1])
        aligned = squeezed.transpose([scaled.index(letter) for letter in order])
        shape = [n if x in scaled else 1 for x, n in zip(letters, array.shape, strict=True)]
        return (array.astype(jnp.float32) * aligned.reshape(shape)).astype(dtype)

    # The compilers for GPUs and TPUs fuse this cast into the product, so no array of the values is
    # written. Integers below 256 are exact in bfloat16.
    if set(scaled) <= set(result):
        y = einsum(equation, x, codes.astype(x.dtype), jnp.float32)
        return multiply(y, result, dtype)
    return einsum(equation, multiply(x, left, x.dtype), codes.astype(x.dtype), dtype)


def _forward(equation, dtype, x, codes, scale):
    if scale.perturbed:
        raise ValueError("quantised weights have no gradient")
    arrays = codes.value, scale.value
    # The empty array has the dtype of x.
    return _scaled_einsum(equation, dtype, x.value, *arrays), (*arrays, jnp.zeros(0, x.value.dtype))


def _backward(equation, dtype, residuals, g):
    (codes, scale, empty_x), (left, right, result) = residuals, re.split(",|->", equation)
    g = instantiate_zeros(g).astype(empty_x.dtype)
    return _scaled_einsum(f"{result},{right}->{left}", g.dtype, g, codes, scale), None, None


_scaled_einsum.defvjp(_forward, _backward, symbolic_zeros=True)


# -- blocks ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BlockMatrix(StoredMatrix):
    """Codes with a scale and a minimum per block of 32 inputs."""

    codes: Array  # uint8
    scale: Array  # float16
    minimum: Array  # float16

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        sizes = zip(self.codes.shape, self.scale.shape, strict=True)
        return tuple(n if n == m else m * BLOCK for n, m in sizes)

    def __getitem__(self, index):
        return BlockMatrix(self.codes[index], self.scale[index], self.minimum[index])

    def einsum(self, equation: str, x, dtype: Any):
        """Computes `product.einsum` with the dequantised values, for a few rows in a kernel."""
        dense = _DenseProduct(equation)
        if dense.is_dense:
            rows = dense.as_matrix(x)
            size = math.prod(self.shape[dense.num_inputs :])
            if block_product.fits(rows.shape, size, x.dtype):
                planes = (self.codes, self.scale, self.minimum)
                y = _multiply_rows(rows, *(plane.reshape(-1, size) for plane in planes))
                return y.astype(dtype).reshape(dense.result_shape(x, self.shape))
        return einsum(equation, x, self.values(x.dtype), dtype)

    def values(self, dtype: Any) -> Array:
        """Returns the whole array."""
        return dequantize(self.codes, self.scale, self.minimum, dtype)


@jax.custom_vjp
def _multiply_rows(x, *planes):
    """Multiplies a few rows by a matrix of blocks. [R, K], [K, N] -> float32 [R, N]"""
    return block_product.multiply_blocks(x, *planes, platform=current_target().platform)


def _multiply_rows_backward(residuals, g):
    planes, empty_x = residuals
    dx = einsum("rn,kn->rk", g.astype(empty_x.dtype), dequantize(*planes, empty_x.dtype))
    return dx, None, None, None


_multiply_rows.defvjp(
    lambda x, *planes: (_multiply_rows(x, *planes), (planes, jnp.zeros(0, x.dtype))),
    _multiply_rows_backward,
)


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


# -- tables ----------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTable(StoredMatrix):
    """A quantised lookup table that is used like an array [V, E]."""

    planes: dict[str, Array]
    dtype: Any = dataclasses.field(metadata=dict(static=True))  # of the looked-up vectors
    factor: float = dataclasses.field(
        default=1.0, metadata=dict(static=True)
    )  # multiplies every value

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        rows, columns = as_matrices(self.planes).shape
        return rows, columns

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids):
        """Looks rows up. int [...] -> [..., E]"""
        rows = {name: plane[ids] for name, plane in self.planes.items()}
        return self._multiply(as_matrices(rows).values(self.dtype))

    def astype(self, dtype):
        """Returns the whole table. -> [V, E]"""
        return self._multiply(as_matrices(self.planes).values(dtype))

    def __mul__(self, factor: float) -> "QuantizedTable":
        """Returns a table whose values are multiplied when they are looked up."""
        return dataclasses.replace(self, factor=self.factor * factor)

    def einsum(self, equation: str, x, dtype: Any):
        """Computes `product.einsum`; blocks are dequantised again in the backward pass."""

        def multiply(x, planes):
            return self._multiply(as_matrices(freeze_planes(planes)).einsum(equation, x, dtype))

        return recompute(multiply, x, self.planes)

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

    A quantised table has no gradient.
    """
    return einsum("...x,vx->...v", features, cast_matrix(table, features.dtype), jnp.float32)


def as_table(table: Array | Mapping[str, Array], dtype: Any) -> Table:
    """Returns a table from a parameter that may be quantised."""
    return QuantizedTable(dict(table), jnp.dtype(dtype)) if is_quantized(table) else table
