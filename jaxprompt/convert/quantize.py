"""Quantises arrays to 8 or 4 bits (layers/quantized), on the host."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxprompt.tree import BLOCK

_LIMIT = float(np.finfo(np.float16).max)


class OutputPlanes(NamedTuple):
    """Rows of a matrix in 8 bits, one scale per row."""

    codes: np.ndarray  # int8 or float8_e4m3fn [rows, columns]
    scale: np.ndarray  # float32 [rows, 1]

    @property
    def T(self) -> "OutputPlanes":
        """The same, with one scale per column."""
        return OutputPlanes(*(plane.T for plane in self))


def quantize_outputs(values: np.ndarray) -> OutputPlanes:
    """Quantises rows symmetrically. No value changes by more than its row's maximum / 254."""
    values = values.astype(np.float32, copy=False)
    scale = np.abs(values).max(1, initial=0.0, keepdims=True) / np.float32(127)
    codes = np.rint(values / np.where(scale > 0, scale, np.float32(np.inf)))
    return OutputPlanes(np.clip(codes, -127, 127).astype(np.int8), scale)


def quantize_float8(values: np.ndarray) -> OutputPlanes:
    """Rounds rows to float8_e4m3fn. A row's maximum becomes the dtype's."""
    values = values.astype(np.float32, copy=False)
    limit = np.float32(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
    scale = np.abs(values).max(1, initial=0.0, keepdims=True) / limit
    codes = np.clip(values / np.where(scale > 0, scale, np.float32(np.inf)), -limit, limit)
    return OutputPlanes(codes.astype(ml_dtypes.float8_e4m3fn), scale)


class Planes(NamedTuple):
    """Quantised rows of a matrix; blocks are along the columns."""

    codes: np.ndarray  # uint8 [rows, columns], or [rows, columns / 2] with two codes in a byte
    scale: np.ndarray  # float16 [rows, columns / 32]
    minimum: np.ndarray  # float16 [rows, columns / 32]

    @property
    def T(self) -> "Planes":
        """The same, with blocks along the rows."""
        return Planes(*(plane.T for plane in self))


def quantize(values: np.ndarray, bits: int) -> Planes:
    """Quantises rows whose length is a multiple of the block size.

    The smallest value of a block has code 0 and the largest the highest code. No value changes by
    more than half a step, plus 2^-10 of the block's largest magnitude and 2^-24, the error of
    rounding minimum and scale to float16.

    Raises:
      ValueError: if a magnitude exceeds half of float16's maximum.
    """
    rows, columns = values.shape
    blocks = values.astype(np.float32, copy=False).reshape(rows, columns // BLOCK, BLOCK)
    low, high = blocks.min(-1), blocks.max(-1)
    if max(np.abs(low).max(initial=0.0), np.abs(high).max(initial=0.0)) > _LIMIT / 2:
        raise ValueError(f"values above {_LIMIT / 2:,.0f}, too large for float16")
    levels = 2**bits - 1
    minimum = low.astype(np.float16)
    # Never above the values: with a negative step all of them would have one code.
    above = minimum > low
    minimum[above] = np.nextafter(minimum[above], np.float16(-np.inf))
    step = (high - minimum.astype(np.float32)) / levels
    scale = step.astype(np.float16)
    # Subnormal scales (below 6e-5) have few bits: rounded down, the highest codes would be far off.
    short = (scale < np.finfo(np.float16).smallest_normal) & (scale < step)
    scale[short] = np.nextafter(scale[short], np.float16(np.inf))
    wide = scale.astype(np.float32)[..., None]
    # A scale of 0: the block is constant, or its range is below the precision of float16.
    steps = (blocks - minimum.astype(np.float32)[..., None]) / np.where(wide > 0, wide, np.inf)
    codes = np.clip(np.rint(steps), 0, levels).astype(np.uint8)
    return Planes(pack_codes(codes, bits).reshape(rows, -1), scale, minimum)


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs the codes of blocks [..., 32] into bytes: [..., 32], or [..., 16] with 4 bits."""
    if bits == 8:
        return codes
    half = BLOCK // 2
    return codes[..., :half] | codes[..., half:] << 4
