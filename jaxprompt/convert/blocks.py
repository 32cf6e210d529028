"""Reads blocks of a tensor from its file, as rows and columns of a matrix.

Only the bytes of a block are read, into memory that is freed with the block. Slices of safetensors,
which maps the file, take the same time, but each page once touched counts as memory of the process:
a Llama of 634 MiB in float32 loads in 3.8 s either way, with a peak of 1,274 MiB instead of 641. A
disk error would also end the process with a signal.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxprompt.errors import InputError

_PAGE = 4096  # bytes; the system reads whole pages
ReadBlock = Callable[[slice, slice], np.ndarray]  # (rows, columns) -> the block, contiguous


class TensorEntry(NamedTuple):
    """One tensor in a checkpoint file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    read: ReadBlock
    is_quantized: bool = False  # in the file; `read` returns the dequantized values
    # (rows, columns in whole blocks of 32, bits) -> Planes with the codes of the file, None if they
    # do not fit; None = the file has no such codes.
    read_planes: Callable[[slice, slice, int], Any] | None = None


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the rows and columns of a tensor as a matrix: the last axis is the columns."""
    return math.prod(shape[:-1]), math.prod(shape[-1:])


def make_reader(path: Path, file: BinaryIO, start: int, width: int, dtype: np.dtype) -> ReadBlock:
    """Returns a reader of a matrix with rows of `width` items, which begins at byte `start`."""

    def read(rows: slice, columns: slice) -> np.ndarray:
        # Part of a row is read alone only if it is a page or more.
        reads_rows = (columns.stop - columns.start) * dtype.itemsize < _PAGE
        span = slice(0, width) if reads_rows else columns
        block = np.empty((rows.stop - rows.start, span.stop - span.start), dtype)
        # Consecutive rows of the file are read at once.
        parts = [block] if block.shape[1] == width else block
        for i, part in enumerate(parts):
            index = (rows.start + i) * width + span.start
            _fill(path, file, part, start + index * dtype.itemsize)
        return np.ascontiguousarray(block[:, columns]) if reads_rows else block

    return read


def _fill(path: Path, file: BinaryIO, array: np.ndarray, offset: int) -> None:
    """Fills the array with bytes from `offset` on."""
    unfilled = array.reshape(-1).view(np.uint8).data
    while unfilled:
        try:
            # preadv does not move the file position, so that threads can share the file, and may
            # read less than requested.
            count = os.preadv(file.fileno(), [unfilled], offset)
        except OSError as error:
            raise read_error(path, error) from error
        if not count:
            raise InputError(f"{path} was cut short while it was read; download it again")
        unfilled, offset = unfilled[count:], offset + count


def read_error(path: Path, error: OSError) -> InputError:
    """Returns the one-line error for a file that the operating system cannot read."""
    return InputError(
        f"{path} cannot be read ({error.strerror}); check it and its permissions, or download it "
        "again"
    )
