"""Reads the tensors of a checkpoint folder one by one: safetensors, or torch files as data only."""

import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxprompt.convert.folder import read_json
from jaxprompt.errors import InputError

_SAFETENSORS = "model.safetensors"
_TORCH = "pytorch_model.bin"
_NUMPY_NAME = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Weights:
    """The tensors of one checkpoint, by name; nothing is read before `read`."""

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

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor in the dtype of the file."""
        return self._entries[name].read()


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
        path.open("rb").close()  # safe_open reports a lack of permission as a lack of the file
        file = stack.enter_context(safe_open(path, framework="numpy"))
    except SafetensorError as error:
        raise InputError(
            f"{path} is corrupt or cut short ({error}); delete it and fetch it anew."
        ) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); check its permissions."
        ) from error
    entries = {}
    for name in file.keys():
        meta = file.get_slice(name)
        dtype = _NUMPY_NAME.get(meta.get_dtype(), meta.get_dtype().lower())
        entries[name] = _Entry(tuple(meta.get_shape()), dtype, lambda n=name: file.get_tensor(n))
    return entries


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

    def read(tensor: "torch.Tensor") -> np.ndarray:
        tensor = tensor.detach().contiguous()
        if tensor.dtype == torch.bfloat16:  # numpy() knows no bfloat16
            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    return {
        name: _Entry(
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), lambda t=tensor: read(t)
        )
        for name, tensor in state.items()
    }
