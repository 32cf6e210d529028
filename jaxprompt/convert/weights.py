"""Reads the tensors of a checkpoint block by block: safetensors, torch files as data, or GGUF.

Only torch files are memory-mapped, because torch defines their layout (see blocks.py).
"""

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
from jaxprompt.convert.blocks import TensorEntry, as_matrix, make_reader, read_error
from jaxprompt.convert.gguf.tensors import open_gguf
from jaxprompt.convert.quantize import Planes
from jaxprompt.data.text.gguf_header import is_gguf
from jaxprompt.errors import InputError, brief
from jaxprompt.files import open_regular, parse_json, read_json
from jaxprompt.tree import BLOCK

_SAFETENSORS = "model.safetensors"
_TORCH = "pytorch_model.bin"
NUMPY_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUMPY = {name: np.dtype(name) for name in ("float64", "float32", "float16")}
_NUMPY["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
FLOATS = tuple(_NUMPY)
# The bits of infinity, above which all values are not finite: an exponent with all bits set.
_INFINITY_BITS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
_BLOCK_BYTES = 2**20  # of `blocks`, which stay in a core's cache while they are hashed and copied


@dataclass(frozen=True)
class CheckpointTensors:
    """The tensors of one checkpoint, by name; nothing is read before `read` or `read_block`.

    As a matrix, a tensor has its last axis as columns and all others as rows (a scalar has one).
    """

    folder: Path
    entries: dict[str, TensorEntry]

    def matrix(self, name: str) -> tuple[int, int]:
        """Returns the rows and columns of a tensor as a matrix."""
        return as_matrix(self.entries[name].shape)

    def blocks(self, name: str, multiple: int = 1) -> Iterator[slice]:
        """Divides the rows of a tensor as a matrix into blocks that are read at once."""
        rows, columns = self.matrix(name)
        step = max(1, _BLOCK_BYTES // max(1, columns * _NUMPY[self.entries[name].dtype].itemsize))
        step = -(-step // multiple) * multiple
        return (slice(first, min(first + step, rows)) for first in range(0, rows, step))

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor in the dtype of the file, one of FLOATS."""
        rows, columns = self.matrix(name)
        return self.read_block(name, slice(0, rows), slice(0, columns)).reshape(
            self.entries[name].shape
        )

    def read_block(self, name: str, rows: slice, columns: slice) -> np.ndarray:
        """Reads part of a tensor as a matrix, [rows, columns], contiguous."""
        return self.entries[name].read(rows, columns)

    def read_planes(self, name: str, rows: slice, columns: slice, bits: int) -> Planes | None:
        """Reads part of a quantised tensor without dequantising it.

        Returns None if the file has floats, or codes with other blocks or more bits.
        """
        read = self.entries[name].read_planes
        return None if read is None else read(rows, columns, bits)

    def has_codes(self, name: str, bits: int) -> bool:
        """Returns whether the file has codes of a tensor that fit into this many bits."""
        block = slice(0, 1), slice(0, BLOCK)
        return self.entries[name].is_quantized and self.read_planes(name, *block, bits) is not None


def is_finite(block: np.ndarray) -> bool:
    """Returns whether a block of a dtype in FLOATS is finite as float32."""
    if block.dtype == np.float64:
        with np.errstate(over="ignore"):
            # Parameters are at most float32, in which it may be infinite.
            block = block.astype(np.float32)
    infinity = _INFINITY_BITS[block.dtype.name]
    # By the maximum of integers: as signed for positive values, as unsigned for negative ones. For
    # bfloat16 that takes 0.03 s/GB, np.isfinite 0.43 s/GB.
    max_positive = block.view(f"i{block.itemsize}").max(initial=0)
    max_any = block.view(f"u{block.itemsize}").max(initial=0)
    sign_bit = 2 ** (8 * block.itemsize - 1)
    return int(max_positive) < infinity and int(max_any) < infinity + sign_bit


@contextmanager
def open_weights(folder: str | Path) -> Iterator[CheckpointTensors]:
    """Opens the checkpoint of a folder, single or sharded; safetensors before torch files.

    `folder` may be a .gguf file.
    """
    folder = Path(folder)
    with ExitStack() as stack:
        yield CheckpointTensors(folder, _open_entries(folder, stack))


def read_tensors(path: Path, is_read: Callable[[str], bool]) -> dict[str, np.ndarray]:
    """Reads the tensors of a safetensors or torch file whose names pass `is_read`."""
    open_file = _open_safetensors if path.suffix == ".safetensors" else _open_torch
    with ExitStack() as stack:
        tensors = CheckpointTensors(path.parent, open_file(path, stack))
        return {name: tensors.read(name) for name in tensors.entries if is_read(name)}


def _open_entries(folder: Path, stack: ExitStack) -> dict[str, TensorEntry]:
    if is_gguf(folder):
        return open_gguf(folder, stack)
    # A single file takes precedence over an index, as in transformers.
    for single, open_file in ((_SAFETENSORS, _open_safetensors), (_TORCH, _open_torch)):
        path, index = folder / single, folder / f"{single}.index.json"
        if os.path.lexists(path):  # a broken link too, for a message that names it
            return open_file(path, stack)
        if os.path.exists(index):
            return _open_shards(index, open_file, stack)
    raise InputError(
        f"{folder} contains neither {_SAFETENSORS} nor {_TORCH}; "
        "give a folder written by save_pretrained"
    )


def _open_shards(index: Path, open_file: Callable, stack: ExitStack) -> dict[str, TensorEntry]:
    shards = read_json(index, "a complete sharded checkpoint").get("weight_map") or {}
    if not isinstance(shards, dict) or not all(isinstance(x, str) for x in shards.values()):
        raise InputError(
            f"{index} has weight_map={brief(shards)}, which must name the file of each tensor; "
            "download the folder again"
        )
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(shards.values())):
        path = index.parent / shard
        # An index is untrusted and must not lead to other files of this machine.
        if Path(shard).name != shard or not os.path.exists(path):
            raise InputError(
                f"{index} lists {brief(shard)}, which is missing from its folder; download the "
                "folder again"
            )
        tensors = open_file(path, stack)
        names = [name for name, file in shards.items() if file == shard]
        missing = sorted(set(names) - set(tensors))
        if missing:
            raise InputError(
                f"{index} lists {missing[0]!r} in {shard}, which does not contain it; index and "
                "files are from different versions: download the folder again"
            )
        # A shard may contain other tensors, such as an older copy of another shard's: as in
        # transformers, only those of the index are read.
        entries |= {name: tensors[name] for name in names}
    return entries


def _open_safetensors(path: Path, stack: ExitStack) -> dict[str, TensorEntry]:
    from safetensors import SafetensorError, safe_open

    try:
        file = stack.enter_context(open_regular(path))
        with safe_open(path, framework="numpy"):  # checks the header against the file's size
            pass
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(size))
    except (SafetensorError, ValueError) as error:
        raise InputError(
            f"{path} is corrupt or cut short ({error}); delete it and download it again"
        ) from error
    except OSError as error:
        raise read_error(path, error) from error
    header.pop("__metadata__", None)
    return {name: _safetensors_entry(path, file, 8 + size, meta) for name, meta in header.items()}


def _safetensors_entry(path: Path, file: BinaryIO, data_start: int, meta: dict) -> TensorEntry:
    shape, start = tuple(meta["shape"]), data_start + meta["data_offsets"][0]
    dtype = NUMPY_NAMES.get(meta["dtype"], meta["dtype"].lower())

    def read(rows: slice, columns: slice) -> np.ndarray:
        width = as_matrix(shape)[1]
        # Here, because numpy may lack the dtype of a tensor that is listed but not read.
        return make_reader(path, file, start, width, _NUMPY[dtype])(rows, columns)

    return TensorEntry(path, shape, dtype, read)


def _open_torch(path: Path, _: ExitStack) -> dict[str, TensorEntry]:
    try:
        open_regular(path).close()
    except OSError as error:
        raise read_error(path, error) from error
    hidden.unhide("torch")
    try:
        import torch
    except ImportError:
        raise InputError(
            f"{path} is a torch file, but torch is not installed; run: pip install torch, "
            "or convert the folder to safetensors"
        ) from None
    try:
        # Only zip archives, torch's format since 1.6, can be memory-mapped.
        state = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except OSError as error:
        raise read_error(path, error) from error
    # There are a dozen other classes; some messages advise to run the code in the file.
    except Exception as error:
        raise InputError(
            f"{path} cannot be read as plain tensors: it is damaged, or contains pickled code, "
            "which is never run; download it again, or give a folder with safetensors files"
        ) from error
    if not isinstance(state, dict) or not all(map(torch.is_tensor, state.values())):
        raise InputError(f"{path} is not a dict of tensors; save only model.state_dict()")
    return {name: _torch_entry(path, tensor.detach()) for name, tensor in state.items()}


def _torch_entry(path: Path, tensor: Any) -> TensorEntry:
    import torch

    shape = tuple(tensor.shape)
    matrix = tensor.reshape(as_matrix(shape))

    def read(rows: slice, columns: slice) -> np.ndarray:
        block = matrix[rows, columns].contiguous()
        if block.dtype == torch.bfloat16:  # not supported by numpy()
            return block.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return block.numpy()

    return TensorEntry(path, shape, str(tensor.dtype).removeprefix("torch."), read)
