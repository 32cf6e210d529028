"""Reads blocks of a tensor from its file, as rows and columns of a matrix.

Only the bytes of a block are read, into memory that is freed with the block. A memory-mapped file
would avoid the copy, but every page once touched would count as memory of this process, and a disk
error would end the process with a signal.
"""

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxprompt.errors import InputError

# Part of a row is read alone where it is a page of the file or more; the system reads whole pages.
_PAGE = 4096
_CURES: dict[int | None, str] = {
    errno.EACCES: "check its permissions", errno.EPERM: "check its permissions",
    errno.EIO: "check the disk", errno.EINVAL: "it is cut short or damaged: download it again",
    errno.ENOENT: "it is a broken link: download it again",
}  # fmt: skip

Read = Callable[[slice, slice], np.ndarray]  # (rows, columns) -> the block, contiguous


class Entry(NamedTuple):
    """One tensor in a checkpoint file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    read: Read
    is_quantized: bool = False  # in the file; `read` gives its numbers
    # Rows and columns, in whole blocks of 32 -> Planes of so many bits as they stand in the file;
    # None = has none that they hold.
    read_planes: Callable[[slice, slice, int], Any] | None = None


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the rows and columns of a tensor as a matrix: the last axis is the columns."""
    return math.prod(shape[:-1]), math.prod(shape[-1:])


def make_reader(path: Path, file: BinaryIO, start: int, width: int, dtype: np.dtype) -> Read:
    """Returns a reader of a matrix with rows of `width` items, which begins at byte `start`."""

    def read(rows: slice, columns: slice) -> np.ndarray:
        own = columns.stop - columns.start
        whole = own * dtype.itemsize < _PAGE
        part = slice(0, width) if whole else columns
        block = np.empty((rows.stop - rows.start, part.stop - part.start), dtype)
        # Rows that follow each other in the file are read at once.
        pieces = [block] if block.shape[1] == width else block
        for i, piece in enumerate(pieces):
            at = (rows.start + i) * width + part.start
            _fill(path, file, piece, start + at * dtype.itemsize)
        return np.ascontiguousarray(block[:, columns]) if whole else block

    return read


def _fill(path: Path, file: BinaryIO, array: np.ndarray, offset: int) -> None:
    """Fills the array with bytes from `offset` on."""
    left = array.reshape(-1).view(np.uint8).data
    while left:
        try:
            # preadv leaves the file's own position alone, so that threads can share it, and
            # may read less than it was asked for.
            count = os.preadv(file.fileno(), [left], offset)
        except OSError as error:
            raise unreadable(path, error) from error
        if not count:
            raise InputError(f"{path} was cut short while it was read; download it again")
        left, offset = left[count:], offset + count


def unreadable(path: Path, error: OSError) -> InputError:
    """Returns the one-line error for a file that the operating system cannot read."""
    cure = _CURES.get(error.errno, "check the path")
    return InputError(f"{path} cannot be read ({error.strerror}); {cure}")
