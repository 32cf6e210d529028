"""Turns numbers into codes of 8 or 4 bits, block by block (layers/quantized.py), on the host."""

from typing import NamedTuple

import numpy as np

from jaxprompt.layers.quantized import BLOCK

_LIMIT = float(np.finfo(np.float16).max)


class Planes(NamedTuple):
    """Quantized rows of a matrix; blocks lie along the columns."""

    codes: np.ndarray  # uint8 [rows, columns], or [rows, columns / 2] with two codes in a byte
    scale: np.ndarray  # float16 [rows, columns / 32]
    minimum: np.ndarray  # float16 [rows, columns / 32]

    @property
    def T(self) -> "Planes":
        """The same with blocks along the rows."""
        return Planes(*(plane.T for plane in self))


def quantize(numbers: np.ndarray, bits: int) -> Planes:
    """Quantizes rows whose length the size of a block divides.

    The least number of a block has code 0 and the greatest the highest code; both are exact but
    for the rounding of minimum and scale to float16, so that no number moves by more than half a
    step and 1/1000 of the block's range. Raises ValueError where a number exceeds float16.
    """
    rows, columns = numbers.shape
    blocks = numbers.astype(np.float32, copy=False).reshape(rows, columns // BLOCK, BLOCK)
    low, high = blocks.min(-1), blocks.max(-1)
    if max(np.abs(low).max(initial=0.0), np.abs(high).max(initial=0.0)) > _LIMIT / 2:
        raise ValueError("numbers that float16 does not hold")
    levels = 2**bits - 1
    minimum = low.astype(np.float16)
    scale = ((high - minimum.astype(np.float32)) / levels).astype(np.float16)
    wide = scale.astype(np.float32)[..., None]
    # A scale of 0: the block is constant, or its range is below what float16 tells apart.
    steps = (blocks - minimum.astype(np.float32)[..., None]) / np.where(wide > 0, wide, np.inf)
    codes = np.clip(np.rint(steps), 0, levels).astype(np.uint8)
    return Planes(pack(codes, bits).reshape(rows, -1), scale, minimum)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Lays codes of blocks [..., 32] into bytes. -> [..., 32], or [..., 16] of 4 bits"""
    if bits == 8:
        return codes
    half = BLOCK // 2
    return codes[..., :half] | codes[..., half:] << 4
