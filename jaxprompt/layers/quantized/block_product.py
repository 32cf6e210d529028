"""Products of a few rows with a matrix of 8- or 4-bit blocks, in Pallas.

A decoding step reads every weight once for a handful of rows. Without a kernel the compilers write
the dequantised matrix and read it again, five times the bytes of the codes; here each tile is
dequantised in registers. With many rows that is amortised, and the compilers' products are faster.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxprompt.parallel import sharding
from jaxprompt.tree import BLOCK

MAX_ROWS = 64
_MIN_ROWS = 16  # of a tensor core, and of a TPU's registers in bfloat16
# Inputs and outputs of a tile: on GPUs of an iteration, on TPUs of the whole program.
_GPU_TILE, _TPU_TILE = (64, 64), (512, 512)
_GPU_PROGRAMS = 512  # several for each multiprocessor; programs that share outputs sum later


def fits(shape: tuple[int, int], outputs: int, dtype) -> bool:
    """Returns whether the program being traced multiplies such rows, [R, K], by the kernel."""
    rows, inputs = shape
    target = sharding.current_target()
    is_gpu = target.platform == "gpu" and target.capability >= 8
    if rows > MAX_ROWS or dtype != jnp.bfloat16 or not (is_gpu or target.platform == "tpu"):
        return False
    # GSPMD cannot partition a Pallas call, and jax.vmap would read the codes for every run.
    if sharding.is_partitioned() or sharding.maps_runs():
        return False
    num_inputs, num_outputs = (BLOCK, 16) if is_gpu else (8 * BLOCK, 128)
    return inputs % num_inputs == 0 and outputs % num_outputs == 0


@functools.partial(jax.jit, static_argnames=("platform", "interpret"))
def multiply_blocks(x, codes, scale, minimum, *, platform: str, interpret: bool = False):
    """Multiplies rows by a matrix of blocks. -> float32 [R, N]

    Args:
      x: the rows, [R, K].
      codes: uint8 [K, N], or [K / 2, N] with two codes in a byte (layers/quantized).
      scale: float16 [K / 32, N].
      minimum: float16 [K / 32, N].
      platform: "gpu" or "tpu".
      interpret: runs the kernel on any device, for tests.
    """
    rows, inputs = x.shape
    per_byte = inputs // len(codes)
    x = jnp.pad(x, [(0, -rows % _MIN_ROWS), (0, 0)])
    if platform == "gpu":
        # Triton loads powers of 2.
        x = jnp.pad(x, [(0, pl.next_power_of_2(len(x)) - len(x)), (0, 0)])
    # The values of the low bits, then those of the high ones: no tile has to be interleaved.
    parts = x.reshape(len(x), -1, per_byte, BLOCK // per_byte).swapaxes(1, 2)
    parts = parts.reshape(len(x), per_byte, -1)
    xs = tuple(parts[:, i] for i in range(per_byte))
    run = _run_on_gpu if platform == "gpu" else _run_on_tpu
    return run(xs, codes, scale, minimum, interpret)[:rows]


def _multiply_tile(xs, codes, scale, minimum):
    """Multiplies loaded values. [R, K / P] x P, [K / P, N], float32 [K / 32, N] x 2 -> [R, N]"""
    shape = len(scale), -1, codes.shape[1]
    codes, y = codes.astype(jnp.int32), 0.0
    for i, x in enumerate(xs):
        bits = codes if len(xs) == 1 else (codes >> (4 * i)) & 15
        values = bits.astype(jnp.float32).reshape(shape) * scale[:, None] + minimum[:, None]
        values = values.reshape(codes.shape).astype(x.dtype)
        y = y + jnp.dot(x, values, preferred_element_type=jnp.float32)
    return y


def _run_on_gpu(xs, codes, scale, minimum, interpret):
    from jax.experimental.pallas import triton

    (rows, num_bytes), outputs = xs[0].shape, codes.shape[1]
    num_blocks = len(scale)
    block_bytes = num_bytes // num_blocks
    blocks = _largest_power(num_blocks, _GPU_TILE[0] // BLOCK)  # of an iteration
    width = _largest_power(outputs, _GPU_TILE[1])
    max_splits = pl.next_power_of_2(max(1, _GPU_PROGRAMS * width // outputs))
    splits = _largest_power(num_blocks // blocks, max_splits)
    steps = num_blocks // blocks // splits

    def kernel(*refs):
        *x_refs, codes_ref, scale_ref, minimum_ref, y_ref = refs
        first = pl.program_id(1) * steps

        def add(i, y):
            in_bytes = pl.ds((first + i) * blocks * block_bytes, blocks * block_bytes)
            in_blocks = pl.ds((first + i) * blocks, blocks)
            scales = (ref[in_blocks, :].astype(jnp.float32) for ref in (scale_ref, minimum_ref))
            tiles = tuple(ref[:, in_bytes] for ref in x_refs)
            return y + _multiply_tile(tiles, codes_ref[in_bytes, :], *scales)

        y_ref[...] = jax.lax.fori_loop(0, steps, add, jnp.zeros((rows, width), jnp.float32))

    x_spec = pl.BlockSpec((rows, num_bytes), lambda n, s: (0, 0))
    specs = [pl.BlockSpec((len(plane), width), lambda n, s: (0, n)) for plane in (codes, scale)]
    y = pl.pallas_call(
        kernel,
        grid=(outputs // width, splits),
        in_specs=[x_spec] * len(xs) + [specs[0], specs[1], specs[1]],
        out_specs=pl.BlockSpec((None, rows, width), lambda n, s: (s, 0, n)),
        out_shape=jax.ShapeDtypeStruct((splits, rows, outputs), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(*xs, codes, scale, minimum)
    return y.sum(0)


def _run_on_tpu(xs, codes, scale, minimum, interpret):
    from jax.experimental.pallas import tpu

    (rows, num_bytes), outputs = xs[0].shape, codes.shape[1]
    block_bytes = num_bytes // len(scale)
    blocks = _largest_power(len(scale), _TPU_TILE[0] // BLOCK)
    width = _largest_power(outputs, _TPU_TILE[1])

    def kernel(*refs):
        *x_refs, codes_ref, scale_ref, minimum_ref, y_ref = refs

        @pl.when(pl.program_id(1) == 0)
        def _():
            y_ref[...] = jnp.zeros_like(y_ref)

        scales = (_widen(ref[...]) for ref in (scale_ref, minimum_ref))
        y_ref[...] += _multiply_tile(tuple(ref[...] for ref in x_refs), codes_ref[...], *scales)

    tile_bytes = blocks * block_bytes
    x_spec = pl.BlockSpec((rows, tile_bytes), lambda n, k: (0, k))
    codes_spec = pl.BlockSpec((tile_bytes, width), lambda n, k: (k, n))
    scale_spec = pl.BlockSpec((blocks, width), lambda n, k: (k, n))
    return pl.pallas_call(
        kernel,
        grid=(outputs // width, len(scale) // blocks),
        in_specs=[x_spec] * len(xs) + [codes_spec, scale_spec, scale_spec],
        out_specs=pl.BlockSpec((rows, width), lambda n, k: (0, n)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(*xs, codes, *(jax.lax.bitcast_convert_type(x, jnp.int16) for x in (scale, minimum)))


def _widen(bits):
    """Converts float16, given as int16, to float32. TPUs have no float16."""
    bits = bits.astype(jnp.int32)
    exponent, fraction = (bits >> 10) & 31, bits & 1023
    normal = jax.lax.bitcast_convert_type(((exponent + 112) << 23) | (fraction << 13), jnp.float32)
    magnitude = jnp.where(exponent > 0, normal, fraction.astype(jnp.float32) * 2.0**-24)
    return jnp.where(bits < 0, -magnitude, magnitude)


def _largest_power(number: int, limit: int) -> int:
    """Returns the largest power of 2 that divides a number, at most `limit`."""
    return min(number & -number, limit)
