"""Cached hidden states: the rows of a split in one array, in memory or on disk.

    <path>.states   the states of all rows, one after another
    <path>.json     setup that they belong to, and their checksum; written last

Without the second file the cache does not exist yet. Each of several processes has its own files.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxprompt.errors import InputError, list_differences
from jaxprompt.files import (
    file_checksum,
    make_folder,
    open_scratch,
    parse_json,
    read_bytes,
    write_atomic,
    write_error,
)


class Store:
    """States of rows of different lengths. Row r has sizes[r] states, without padding."""

    def __init__(self, sizes: np.ndarray, states: np.ndarray):
        """Takes int [rows] and the states [sum of sizes, H]."""
        self.states = states
        self._sizes = sizes.astype(np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def read(self, rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Returns the states of rows where the mask is True, else 0: [B], bool [B, T] -> [B, T, H].

        A row of -1 is padding.
        """
        states = np.zeros((*mask.shape, self.states.shape[1]), self.states.dtype)
        states[mask] = self.states[self._indices(rows, mask)]
        return states

    def write(self, rows: np.ndarray, mask: np.ndarray, values: np.ndarray) -> None:
        """Stores what `read` will return. [B], bool [B, T], [B, T, H]"""
        self.states[self._indices(rows, mask)] = values[mask]

    def _indices(self, rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Returns the indices of the states where a mask is True, row by row."""
        counts = mask.sum(1)
        expected = np.where(rows >= 0, self._sizes[rows], 0)
        if (counts != expected).any():
            raise ValueError(f"rows of {counts} tokens, of which {expected} states are kept")
        before = np.cumsum(counts) - counts
        # A row of -1 has no token, so its start is repeated 0 times.
        return np.repeat(self._starts[rows] - before, counts) + np.arange(counts.sum())


def memory_store(sizes: np.ndarray, width: int, dtype: np.dtype) -> Store:
    """Returns an empty store in host memory."""
    return Store(sizes, np.empty((int(sizes.sum()), width), dtype))


class DiskStore(Store):
    """A store being written to a temporary file, which `seal` renames to `path`."""

    def __init__(self, path: Path, sizes: np.ndarray, width: int, dtype: np.dtype):
        """Allocates disk space. Raises InputError on a full disk, or if another run writes here."""
        make_folder(path.parent)
        self._path = path
        self._scratch = path.with_name(f".{path.name}.states.tmp")
        shape = (int(sizes.sum()), width)
        size = shape[0] * width * dtype.itemsize
        try:
            self._file = open_scratch(self._scratch)
        except OSError as error:
            raise write_error(self._scratch, error) from error
        try:
            # The system releases the lock when the process ends, even if it is killed.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(size)
            # Reserved now: a full disk during a write to the memory map would kill the process.
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(self._file.fileno(), 0, size)
        except BlockingIOError as error:
            self._file.close()
            raise InputError(
                f"another run is filling {path.parent}; wait for it, or use another cache.folder"
            ) from error
        except OSError as error:
            self._file.close()
            self._scratch.unlink(missing_ok=True)
            raise write_error(self._scratch, error) from error
        self._map = np.memmap(self._scratch, dtype, "r+", shape=shape)
        super().__init__(sizes, self._map)

    def seal(self, setup: Mapping[str, str]) -> Store:
        """Renames the file and records its setup (`setup`). Returns the store to read from."""
        data, index = _files(self._path)
        try:
            # The states must be on disk before the file that declares them complete.
            self._map.flush()
            os.fsync(self._file.fileno())
            index.unlink(missing_ok=True)  # of states that another process did not have
            os.replace(self._scratch, data)
        except OSError as error:
            raise write_error(data, error) from error
        metadata = {
            "facts": dict(setup),
            "bytes": self.states.nbytes,
            "crc": file_checksum(data),
        }
        write_atomic(index, json.dumps(metadata, indent=2) + "\n")
        self._file.close()
        return Store(self._sizes, self.states)


def open_states(
    path: Path, setup: Mapping[str, str], sizes: np.ndarray, width: int, dtype: np.dtype
) -> Store | None:
    """Opens the states of an earlier run, None if there are none.

    Raises InputError if they belong to other `setup` or are damaged.
    """
    data, index = _files(path)
    if not index.exists():
        return None
    damaged = InputError(f"{data} is damaged; delete {path.parent} to compute it again")
    try:
        metadata = parse_json(read_bytes(index))
        saved, crc = metadata["facts"], metadata["crc"]
        is_damaged = file_checksum(data) != crc
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged from error
    if differing := list_differences(saved, setup):
        raise InputError(
            f"{path.parent} has states cached for a different setup: {differing}; use "
            "another cache.folder, or delete this one"
        )
    shape = (int(sizes.sum()), width)
    if is_damaged or data.stat().st_size != shape[0] * width * dtype.itemsize:
        raise damaged
    return Store(sizes, np.memmap(data, dtype, "r", shape=shape))


def states_path(folder: Path, name: str, process: int, count: int) -> Path:
    """Returns the path of one process's files of a split."""
    return folder / (name if count == 1 else f"{name}-{process}-of-{count}")


def _files(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.name}.states"), path.with_name(f"{path.name}.json")
