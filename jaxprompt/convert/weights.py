"""Reads the tensors of a checkpoint folder block by block: safetensors, or torch files as data.

Only the bytes of a block are read, into memory that goes with it. A mapped file would do without
the copy, but every page once touched would count as this process's memory, and a disk that fails
would end it with a signal. Torch files are mapped all the same: their layout is torch's own.
"""

import json
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from jaxprompt.errors import InputError
from jaxprompt.files import read_json

_SAFETENSORS = "model.safetensors"
_TORCH = "pytorch_model.bin"
NUMPY_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUMPY = {name: np.dtype(name) for name in ("float64", "float32", "float16")}
_NUMPY["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
FLOATS = tuple(_NUMPY)
# Part of a row is read alone where it is a page of the file or more; the system reads whole pages.
_PAGE = 4096
_BLOCK = 2**20  # bytes of `blocks`: they stay in a core's cache while they are hashed and copied


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[slice, slice], np.ndarray]  # (rows, columns) -> the block, contiguous


@dataclass(frozen=True)
class Weights:
    """The tensors of one checkpoint, by name; nothing is read before `read` or `read_block`.

    As a matrix, a tensor has its last axis as columns, and all others as rows (one of none).
    """

    folder: Path
    _entries: dict[str, _Entry]

    def names(self) -> list[str]:
        """Lists the tensor names, sorted."""
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor in the file."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Returns the numpy name of a tensor's dtype in the file, e.g. "bfloat16"."""
        return self._entries[name].dtype

    def matrix(self, name: str) -> tuple[int, int]:
        """Returns the rows and columns of a tensor as a matrix."""
        return _matrix(self.shape(name))

    def blocks(self, name: str) -> Iterator[slice]:
        """Divides the rows of a tensor as a matrix into what is read at once."""
        rows, columns = self.matrix(name)
        step = max(1, _BLOCK // max(1, columns * _NUMPY[self.dtype(name)].itemsize))
        return (slice(first, min(first + step, rows)) for first in range(0, rows, step))

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor in the dtype of the file, which is one of FLOATS."""
        rows, columns = self.matrix(name)
        return self.read_block(name, slice(0, rows), slice(0, columns)).reshape(self.shape(name))

    def read_block(self, name: str, rows: slice, columns: slice) -> np.ndarray:
        """Reads part of a tensor as a matrix. -> [rows, columns], contiguous"""
        return self._entries[name].read(rows, columns)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), math.prod(shape[-1:])


@contextmanager
def open_weights(folder: str | Path) -> Iterator[Weights]:
    """Opens the checkpoint of a folder, single or sharded; safetensors before torch files."""
    folder = Path(folder)
    try:
        present = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror}); check the path.") from error
    with ExitStack() as stack:
        for single, open_file in ((_SAFETENSORS, _open_safetensors), (_TORCH, _open_torch)):
            index = f"{single}.index.json"
            if single in present:
                yield Weights(folder, open_file(folder / single, stack))
                return
            if index in present:
                yield Weights(folder, _open_shards(folder / index, open_file, stack))
                return
        raise InputError(
            f"{folder} holds neither {_SAFETENSORS} nor {_TORCH}; "
            "give a folder as save_pretrained writes it."
        )


def _open_shards(index: Path, open_file: Callable, stack: ExitStack) -> dict[str, _Entry]:
    where = read_json(index, "a complete sharded checkpoint").get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise InputError(f"{index} has no 'weight_map' of tensor to file; fetch the folder anew.")
    entries = {}
    for shard in sorted(set(where.values())):
        if Path(shard).name != shard:
            raise InputError(f"{index} names {shard!r}, outside its folder; fetch the folder anew.")
        path = index.parent / shard
        if not path.exists():
            raise InputError(f"{index.name} names {shard!r}, absent from {index.parent}; fetch it.")
        entries |= open_file(path, stack)
    lost = sorted(set(where) - set(entries))
    if lost:
        raise InputError(
            f"{index} names tensors that its files lack ({len(lost)}, first {lost[0]!r}); "
            "index and files are of different versions, fetch the folder anew."
        )
    return entries


def _open_safetensors(path: Path, stack: ExitStack) -> dict[str, _Entry]:
    from safetensors import SafetensorError, safe_open

    try:
        file = stack.enter_context(path.open("rb"))
        with safe_open(path, framework="numpy"):  # checks the header against the file's size
            pass
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    except SafetensorError as error:
        raise InputError(
            f"{path} is corrupt or cut short ({error}); delete it and fetch it anew."
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    header.pop("__metadata__", None)
    return {name: _entry(path, file, 8 + size, meta) for name, meta in header.items()}


def _entry(path: Path, file: BinaryIO, data: int, meta: dict) -> _Entry:
    shape, (begin, _) = tuple(meta["shape"]), meta["data_offsets"]
    name = NUMPY_NAMES.get(meta["dtype"], meta["dtype"].lower())

    def read(rows: slice, columns: slice) -> np.ndarray:
        dtype, width = _NUMPY[name], _matrix(shape)[1]
        own = columns.stop - columns.start
        whole = own * dtype.itemsize < _PAGE
        part = slice(0, width) if whole else columns
        block = np.empty((rows.stop - rows.start, part.stop - part.start), dtype)
        # Rows that follow each other in the file are read at once.
        pieces = [block] if block.shape[1] == width else block
        for i, piece in enumerate(pieces):
            at = (rows.start + i) * width + part.start
            _fill(path, file, piece, data + begin + at * dtype.itemsize)
        return np.ascontiguousarray(block[:, columns]) if whole else block

    return _Entry(shape, name, read)


def _fill(path: Path, file: BinaryIO, array: np.ndarray, offset: int) -> None:
    """Reads from a place in the file until the array is full."""
    left = memoryview(array.reshape(-1).view(np.uint8))
    while left:
        try:
            count = os.preadv(file.fileno(), [left], offset)
        except OSError as error:
            raise _unreadable(path, error) from error
        if not count:
            raise InputError(f"{path} was cut short while it was read; fetch it anew.")
        left, offset = left[count:], offset + count


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be read ({error.strerror}); check its permissions.")


def _open_torch(path: Path, _: ExitStack) -> dict[str, _Entry]:
    try:
        import torch
    except ImportError:
        raise InputError(
            f"{path} is a torch file and torch is not installed; pip install torch, "
            "or convert the folder to safetensors."
        ) from None
    try:
        # Only zip archives, torch's format since 1.6, can be mapped instead of read whole.
        state = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise InputError(
            f"{path} cannot be read as plain tensors ({reason}); fetch it anew, "
            "or convert the folder to safetensors."
        ) from error
    if not isinstance(state, dict) or not all(torch.is_tensor(t) for t in state.values()):
        raise InputError(f"{path} is no table of tensors; save model.state_dict() alone.")

    return {name: _torch_entry(tensor.detach()) for name, tensor in state.items()}


def _torch_entry(tensor: Any) -> _Entry:
    import torch

    shape = tuple(tensor.shape)
    matrix = tensor.reshape(_matrix(shape))

    def read(rows: slice, columns: slice) -> np.ndarray:
        block = matrix[rows, columns].contiguous()
        if block.dtype == torch.bfloat16:  # numpy() knows no bfloat16
            return block.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return block.numpy()

    return _Entry(shape, str(tensor.dtype).removeprefix("torch."), read)
