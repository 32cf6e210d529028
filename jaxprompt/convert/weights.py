"""Reads the tensors of a checkpoint block by block: safetensors, torch files as data, or GGUF.

Only torch files are memory-mapped, because torch defines their layout (see blocks.py).
"""

import math
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxprompt import hidden
from jaxprompt.convert.blocks import Entry, as_matrix, make_reader, unreadable
from jaxprompt.convert.gguf.tensors import open_gguf
from jaxprompt.convert.quantize import Planes
from jaxprompt.data.text.gguf_header import is_gguf
from jaxprompt.errors import InputError
from jaxprompt.files import parse_json, read_json
from jaxprompt.tree import BLOCK

_SAFETENSORS = "model.safetensors"
_TORCH = "pytorch_model.bin"
NUMPY_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUMPY = {name: np.dtype(name) for name in ("float64", "float32", "float16")}
_NUMPY["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
FLOATS = tuple(_NUMPY)
# The least bits of what is not finite, the sign aside: an exponent with all of its bits set.
_EXPONENTS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
_BLOCK = 2**20  # bytes of `blocks`: they stay in a core's cache while they are hashed and copied


@dataclass(frozen=True)
class Weights:
    """The tensors of one checkpoint, by name; nothing is read before `read` or `read_block`.

    As a matrix, a tensor has its last axis as columns and all others as rows (a scalar has one).
    """

    folder: Path
    _entries: dict[str, Entry]

    def names(self) -> list[str]:
        """Returns the tensor names, sorted."""
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor in the file."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Returns the numpy name of a tensor's dtype in the file, e.g. "bfloat16"."""
        return self._entries[name].dtype

    def file(self, name: str) -> Path:
        """Returns the file that holds a tensor."""
        return self._entries[name].path

    def matrix(self, name: str) -> tuple[int, int]:
        """Returns the rows and columns of a tensor as a matrix."""
        return as_matrix(self.shape(name))

    def blocks(self, name: str, multiple: int = 1) -> Iterator[slice]:
        """Divides the rows of a tensor as a matrix into blocks that are read at once."""
        rows, columns = self.matrix(name)
        step = max(1, _BLOCK // max(1, columns * _NUMPY[self.dtype(name)].itemsize))
        step = -(-step // multiple) * multiple
        return (slice(first, min(first + step, rows)) for first in range(0, rows, step))

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor in the dtype of the file, one of FLOATS."""
        rows, columns = self.matrix(name)
        return self.read_block(name, slice(0, rows), slice(0, columns)).reshape(self.shape(name))

    def read_block(self, name: str, rows: slice, columns: slice) -> np.ndarray:
        """Reads part of a tensor as a matrix, [rows, columns], contiguous."""
        return self._entries[name].read(rows, columns)

    def is_quantized(self, name: str) -> bool:
        """Returns whether a tensor is quantised in the file."""
        return self._entries[name].is_quantized

    def read_planes(self, name: str, rows: slice, columns: slice, bits: int) -> Planes | None:
        """Reads part of a quantised tensor without dequantising it.

        Returns None if the file has floats, or codes with other blocks or more bits.
        """
        read = self._entries[name].read_planes
        return None if read is None else read(rows, columns, bits)

    def has_codes(self, name: str, bits: int) -> bool:
        """Returns whether the file has codes of a tensor that fit into this many bits."""
        block = slice(0, 1), slice(0, BLOCK)
        return self.is_quantized(name) and self.read_planes(name, *block, bits) is not None


def is_finite(block: np.ndarray) -> bool:
    """Returns whether a block of a dtype in FLOATS is finite as float32."""
    if block.dtype == np.float64:
        with np.errstate(over="ignore"):
            # It will be float32 at most, where it may be infinite.
            block = block.astype(np.float32)
    least = _EXPONENTS[block.dtype.name]
    # Of whole numbers the greatest is found fastest: as signed among the positive, else among all.
    positive = block.view(f"i{block.itemsize}").max(initial=0)
    every = block.view(f"u{block.itemsize}").max(initial=0)
    return int(positive) < least and int(every) < least + 2 ** (8 * block.itemsize - 1)


@contextmanager
def open_weights(folder: str | Path) -> Iterator[Weights]:
    """Opens the checkpoint of a folder, single or sharded; safetensors before torch files.

    `folder` may be a .gguf file.
    """
    folder = Path(folder)
    try:
        present = set() if is_gguf(folder) else {path.name for path in folder.iterdir()}
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror}); check the path") from error
    with ExitStack() as stack:
        if is_gguf(folder):
            yield Weights(folder, open_gguf(folder, stack))
            return
        # A single file goes before an index, as in transformers.
        for single, open_file in ((_SAFETENSORS, _open_safetensors), (_TORCH, _open_torch)):
            index = f"{single}.index.json"
            if single in present:
                yield Weights(folder, open_file(folder / single, stack))
                return
            if index in present:
                yield Weights(folder, _open_shards(folder / index, open_file, stack))
                return
        raise InputError(
            f"{folder} contains neither {_SAFETENSORS} nor {_TORCH}; "
            "give a folder written by save_pretrained"
        )


def _open_shards(index: Path, open_file: Callable, stack: ExitStack) -> dict[str, Entry]:
    where = read_json(index, "a complete sharded checkpoint").get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise InputError(f"{index} has no valid 'weight_map'; download the folder again")
    entries: dict[str, Entry] = {}
    for shard in sorted(set(where.values())):
        # An index may come from anyone: it must not lead to other files of this machine.
        if Path(shard).name != shard:
            raise InputError(
                f"{index} lists {shard!r}, outside its folder; download the folder again"
            )
        path = index.parent / shard
        if not path.exists():
            raise InputError(
                f"{index.name} lists {shard!r}, which is missing from {index.parent}; download it"
            )
        tensors = open_file(path, stack)
        names = [name for name, file in where.items() if file == shard]
        lost = sorted(set(names) - set(tensors))
        if lost:
            raise InputError(
                f"{index} lists {lost[0]!r} in {shard}, which does not contain it ({len(lost)} "
                "such tensors in this file); index and files are from different versions: download "
                "the folder again"
            )
        # A shard may hold more, such as an older copy of another shard's tensor: as in
        # transformers, the index alone says what is read, and from which file.
        entries |= {name: tensors[name] for name in names}
    return entries


def _open_safetensors(path: Path, stack: ExitStack) -> dict[str, Entry]:
    from safetensors import SafetensorError, safe_open

    try:
        file = stack.enter_context(path.open("rb"))
        with safe_open(path, framework="numpy"):  # checks the header against the file's size
            pass
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(size))
    except (SafetensorError, ValueError) as error:
        raise InputError(
            f"{path} is corrupt or cut short ({error}); delete it and download it again"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    header.pop("__metadata__", None)
    return {name: _entry(path, file, 8 + size, meta) for name, meta in header.items()}


def _entry(path: Path, file: BinaryIO, data: int, meta: dict) -> Entry:
    shape, (begin, end) = tuple(meta["shape"]), meta["data_offsets"]
    name = NUMPY_NAMES.get(meta["dtype"], meta["dtype"].lower())
    size = math.prod(shape) * _NUMPY[name].itemsize if name in _NUMPY else end - begin
    if end - begin != size or data + end > os.fstat(file.fileno()).st_size:
        raise InputError(f"{path} has a header that does not match its size; download it again")

    def read(rows: slice, columns: slice) -> np.ndarray:
        width = as_matrix(shape)[1]
        # Made here, as numpy may lack the dtype: such a tensor is listed, and never read.
        return make_reader(path, file, data + begin, width, _NUMPY[name])(rows, columns)

    return Entry(path, shape, name, read)


def _open_torch(path: Path, _: ExitStack) -> dict[str, Entry]:
    hidden.unhide("torch")
    try:
        import torch
    except ImportError:
        raise InputError(
            f"{path} is a torch file, but torch is not installed; run: pip install torch, "
            "or convert the folder to safetensors"
        ) from None
    try:
        # Only zip archives, torch's format since 1.6, can be mapped instead of read whole.
        state = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except OSError as error:
        raise unreadable(path, error) from error
    # Of the other errors there are a dozen kinds; some advise to run what the file brings along.
    except Exception as error:
        raise InputError(
            f"{path} cannot be read as plain tensors: it is damaged, or contains pickled code, "
            "which is never run; download it again, or give a folder with safetensors files"
        ) from error
    if not isinstance(state, dict) or not all(_is_plain(*pair) for pair in state.items()):
        raise InputError(f"{path} is not a dict of tensors; save only model.state_dict()")

    return {name: _torch_entry(path, tensor.detach()) for name, tensor in state.items()}


def _is_plain(name: Any, tensor: Any) -> bool:
    """Returns whether an item of a state dict is a named tensor in memory."""
    import torch

    plain = torch.is_tensor(tensor) and tensor.layout == torch.strided and not tensor.is_quantized
    return plain and tensor.device.type == "cpu" and isinstance(name, str)


def _torch_entry(path: Path, tensor: Any) -> Entry:
    import torch

    shape = tuple(tensor.shape)
    matrix = tensor.reshape(as_matrix(shape))

    def read(rows: slice, columns: slice) -> np.ndarray:
        block = matrix[rows, columns].contiguous()
        if block.dtype == torch.bfloat16:  # numpy() knows no bfloat16
            return block.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return block.numpy()

    return Entry(path, shape, str(tensor.dtype).removeprefix("torch."), read)
