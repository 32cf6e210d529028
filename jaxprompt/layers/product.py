"""Products of two arrays in 16 bits, forward and backward.

The gradient of a float32 result would widen both sides of the products behind it; here it is cast
first. XLA's kernels for a CPU's bfloat16 units sum in float32 and give float32: a product that
asks for bfloat16, or has one side widened, is computed in float32 at less than half the speed. So
there such a product gives float32 and is cast.
"""

import abc
import dataclasses
import functools
import re
import string
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import dtypes

from jaxprompt.layers.recompute import instantiate_zeros
from jaxprompt.parallel.sharding import current_target
from jaxprompt.types import Array


class StoredMatrix(abc.ABC):
    """A frozen matrix in fewer bits, which products read in the place of an array."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""

    @abc.abstractmethod
    def einsum(self, equation: str, x, dtype: Any):
        """Computes `einsum` of x and this matrix; only x has a gradient."""


# Not a pytree: flax compares the shape of a parameter's first leaf.
@dataclasses.dataclass(frozen=True)
class ScaledMatrix(StoredMatrix):
    """Codes with one scale per output of the product."""

    codes: Array
    scale: Array  # float32, 1 along the input axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.codes.shape

    def __getitem__(self, index):
        return type(self)(self.codes[index], self.scale[index])

    def values(self, dtype: Any) -> Array:
        """Returns the whole array."""
        return (self.codes.astype(jnp.float32) * self.scale).astype(dtype)


def _is_16_bit(x, y) -> bool:
    return x.dtype == y.dtype and x.dtype.itemsize == 2


def _is_slow(x) -> bool:
    return x.dtype == jnp.bfloat16 and current_target().platform == "cpu"


def einsum(equation: str, x, y, dtype=None):
    """Computes jnp.einsum of two arrays in which every letter occurs twice. `dtype` None = x's

    Only x may begin with "...", and the result then does too. y may be a `StoredMatrix`.
    """
    if equation.startswith("..."):  # replaced by letters, which `_einsum_16_bit` can reorder
        num_named = equation.index(",") - len("...")
        equation = equation.replace("...", string.ascii_uppercase[: x.ndim - num_named])
    if isinstance(y, StoredMatrix):
        return y.einsum(equation, x, jnp.dtype(dtype or x.dtype))
    if _is_16_bit(x, y):
        return _einsum_16_bit(equation, jnp.dtype(dtype or x.dtype), x, y)
    return jnp.einsum(equation, x, y, preferred_element_type=dtype)


def dot_general(x, kernel, dimensions, precision=None, *, dtype=None, **options):
    """Computes lax.dot_general as flax's dense layers call it: last axes of x, first of a kernel.

    `dtype` is that of the result, None = x's.
    """
    if not isinstance(kernel, StoredMatrix) and dtype is None:
        if not (_is_16_bit(x, kernel) and _is_slow(x)):
            return jax.lax.dot_general(x, kernel, dimensions, precision, **options)
    batch_ndim = x.ndim - len(dimensions[0][0])
    letters = string.ascii_lowercase[: batch_ndim + len(kernel.shape)]
    result = letters[:batch_ndim] + letters[x.ndim :]
    return einsum(f"{letters[: x.ndim]},{letters[batch_ndim:]}->{result}", x, kernel, dtype)


def cast_matrix(matrix: Any, dtype: Any) -> Any:
    """Casts an array for a product; a `StoredMatrix` stays as it is."""
    return matrix if isinstance(matrix, StoredMatrix) else matrix.astype(dtype)


def promote_dtype(*operands: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Casts x, kernel and bias of flax's dense layers; a `StoredMatrix` stays as it is."""
    x, kernel, bias = operands
    if isinstance(kernel, StoredMatrix):
        x, bias = dtypes.promote_dtype(x, bias, dtype=dtype, inexact=inexact)
        return [x, kernel, bias]
    return dtypes.promote_dtype(x, kernel, bias, dtype=dtype, inexact=inexact)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum_16_bit(equation, dtype, x, y):
    if not _is_slow(x):
        return jnp.einsum(equation, x, y, preferred_element_type=dtype)
    left, right, result = re.split(",|->", equation)
    free = iter([letter for letter in result if letter in left and letter not in right])
    order = [next(free) if letter not in right else letter for letter in left if letter in result]
    order += [letter for letter in left if letter not in result]
    if order != list(left):
        # The kernels need summed axes last, and those of x alone in the order of the result.
        # Without the barrier XLA would merge the transposition into the product, for which it has
        # no kernel.
        x = jax.lax.optimization_barrier(x.transpose([left.index(letter) for letter in order]))
    equation = f"{''.join(order)},{right}->{result}"
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32).astype(dtype)


def _forward(equation, dtype, x, y):
    # An operand is stored if the other one has a gradient: a frozen weight has none. Else an empty
    # array, not None: jax.checkpoint traces this twice, and may differ in what has a gradient.
    empty = jnp.zeros(0, x.value.dtype)
    operands = x.value if y.perturbed else empty, y.value if x.perturbed else empty
    return _einsum_16_bit(equation, dtype, x.value, y.value), (*operands, empty)


def _backward(equation, dtype, residuals, g):
    (x, y, empty_x), (left, right, result) = residuals, re.split(",|->", equation)
    # `empty_x` has the dtype of x, which may not have been stored.
    g, dtype_of_x = instantiate_zeros(g).astype(empty_x.dtype), empty_x.dtype
    dx = None if y.size == 0 else _einsum_16_bit(f"{result},{right}->{left}", dtype_of_x, g, y)
    dy = None if x.size == 0 else _einsum_16_bit(f"{left},{result}->{right}", dtype_of_x, x, g)
    return dx, dy


_einsum_16_bit.defvjp(_forward, _backward, symbolic_zeros=True)
