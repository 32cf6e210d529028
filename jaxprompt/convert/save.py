"""Writes a backbone as a folder that transformers loads: the inverse of load.py, by its tables.

The files are written to a temporary folder, which is renamed once it is complete. All processes
that share the parameters must call together; process 0 writes.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from jaxprompt.convert.artifact import package_versions
from jaxprompt.convert.folder import TOKENIZER_FILES
from jaxprompt.convert.load import DTYPES
from jaxprompt.convert.model_card import render_backbone_card
from jaxprompt.convert.shapes import (
    axis_sizes,
    copy_index,
    file_names,
    file_shape,
    get_family,
    num_copies,
    select_tensors,
)
from jaxprompt.convert.tensors import Family, Tensor
from jaxprompt.convert.weights import NUMPY_NAMES
from jaxprompt.data.text.gguf_header import is_gguf
from jaxprompt.data.text.gguf_tokenizer import tokenizer_folder
from jaxprompt.errors import InputError, with_article
from jaxprompt.files import acquire_lock, dumps, make_folder, read_json, write_atomic, write_error
from jaxprompt.parallel import processes
from jaxprompt.tree import Flat, Params, flatten, is_layer_list

FILE_BYTES = 5 * 10**9
TRAINING = "training.json"  # the run that a folder belongs to, and the fields of its model card
# Fields of a config that transformers writes itself, or that do not apply to the saved weights.
_REPLACED_FIELDS = (
    "architectures", "auto_map", "dtype", "quantization_config", "torch_dtype",
    "transformers_version", "_name_or_path",
)  # fmt: skip


class _FileTensor(NamedTuple):
    """One tensor of the file, and the parameters that are concatenated in it."""

    parts: list[Tensor]
    layer: int
    shape: tuple[int, ...]


def save_backbone(
    folder: str | Path,
    family: str,
    config: Mapping[str, Any],
    params: Params,
    *,
    tokenizer: str | Path,
    card: Mapping[str, Any],
    run: str,
    dtype: str = "float32",
    rescale: float = 1.0,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Writes weights, config.json, tokenizer and model card.

    Args:
      folder: where to write; a folder that the same run wrote is replaced.
      family: the backbone family.
      config: a transformers config.json.
      params: a nested dict as load_backbone returns it, of arrays on any mesh, with the heads to
        save. Padding of the vocabulary is removed and a T5's `rescale` is undone.
      tokenizer: the folder, or .gguf file, whose tokenizer is copied.
      card: the contents of the model card, see `render_backbone_card`.
      run: identifies the run that the folder belongs to.
      dtype: the dtype of the file.
      rescale: as in load_backbone.
      file_bytes: the maximum size of a file, unless a single tensor is larger. The host holds one
        tensor at a time.

    Returns:
      The folder.

    Raises:
      InputError: if the folder contains anything else, or cannot be written. Existing files are
        then untouched.
    """
    table = get_family(family)
    flat, sizes = flatten(params), axis_sizes(config, table)
    heads = [head for head in table.heads if head in params] + list(table.always)
    tied = table.decoder.path not in flat
    tensors = select_tensors(table, config, sizes, heads, tied=tied)
    file_tensors = _file_tensors(table, tensors, sizes, tied=tied)
    split = _split_files(file_tensors, DTYPES[dtype], file_bytes)
    files = split.filename_to_tensors
    # Before anything is written, because transformers may reject the config.
    saved = saved_config(family, config, heads, dtype)
    texts = _text_files(Path(folder).name, saved, card, run, split)
    target = Path(os.path.abspath(folder))
    partial = target.with_name(f".{target.name}.partial")

    @_write_errors(target)
    def prepare() -> None:
        _check_target(target, run)
        tokenizer_files = _tokenizer_files(Path(tokenizer))
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(target.parent)
        partial.mkdir()  # fails if somebody else created a link there
        for path in tokenizer_files:
            shutil.copyfile(path, partial / path.name)
        for name, text in texts.items():
            write_atomic(partial / name, text)
        for name, names in files.items():
            _reserve(partial / name, {n: file_tensors[n].shape for n in names}, dtype)

    @_write_errors(target)
    def finish() -> None:
        # Last, so that an incomplete folder cannot be loaded.
        write_atomic(partial / "config.json", _json(saved))
        _replace_folder(partial, target)

    with contextlib.ExitStack() as stack:
        processes.run_on_first(lambda: stack.enter_context(_lock(target)))
        stack.enter_context(_write_errors(target))
        stack.enter_context(_removed_on_failure(partial))
        processes.run_on_first(prepare)
        for file, names in files.items():
            # A collective: all processes run this loop, and the first writes.
            with _open_reserved(partial / file) as out:
                for name in names:
                    array = _gather(flat, file_tensors[name], sizes, rescale)
                    _write(out, array.astype(DTYPES[dtype], order="C", copy=False))
        processes.run_on_first(finish)
    return Path(folder)


def check_loadable(family: str, advice: str) -> None:
    """Raises InputError, which ends with `advice`, if transformers has no class for a family."""
    if not get_family(family).classes:
        raise InputError(f"transformers has no class that loads {with_article(family)}; {advice}")


def saved_config(
    family: str, config: Mapping[str, Any], heads: Collection[str], dtype: str = "float32"
) -> dict[str, Any]:
    """Returns the config.json of saved weights, with the class of transformers that loads them.

    The config class of transformers fills in missing fields; those of `config` stay as they are.

    Raises:
      InputError: if that class rejects the config.
    """
    from transformers import AutoConfig

    model_type = config.get("model_type") or family
    fields = {name: value for name, value in config.items() if name not in _REPLACED_FIELDS}
    fields["model_type"] = model_type
    try:
        hf_config = AutoConfig.for_model(**fields)
    # Strict data classes, validators and lookups of names raise different classes.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"transformers rejects the config ({reason}); give the config.json of a {model_type}"
        ) from error
    # Not from transformers' tables of classes, which can be read only if torch is installed.
    classes = get_family(family).classes
    suffix = next((classes[head] for head in classes if head in heads), "Model")
    # The names of Gemma 3's text model and of its config differ.
    name = type(hf_config).__name__.removesuffix("Config").removesuffix("Text") + suffix
    defaults = json.loads(hf_config.to_json_string())
    return defaults | fields | {"architectures": [name], "dtype": dtype}


def _file_tensors(
    table: Family, tensors: list[Tensor], sizes: Mapping[str, int], *, tied: bool
) -> dict[str, _FileTensor]:
    """Returns the tensors of the files by name."""
    has_head = any(t.outside or t.path.startswith(("mlm/", "rtd/")) for t in tensors)
    prefix = table.prefix if (has_head or table.always) and not table.bare else ""
    file_tensors: dict[str, _FileTensor] = {}
    for tensor in tensors:
        for layer in range(num_copies(tensor, sizes)):
            names = file_names(tensor, layer, prefix, sizes.get("I", 1))
            # Torch's untied decoder uses its own bias, but the other bias is a parameter too.
            for name in names if tensor.path == "mlm/bias" and not tied else names[-1:]:
                empty = _FileTensor([], layer, file_shape(tensor, sizes))
                file_tensors.setdefault(name, empty).parts.append(tensor)
    return file_tensors


def _text_files(
    name: str, config: Mapping[str, Any], card: Mapping[str, Any], run: str, split: Any
) -> dict[str, str]:
    """Returns the model card, the training record and the index of several files, by file name."""
    card = {**card, "versions": package_versions()}
    texts = {
        "README.md": render_backbone_card(name, config["architectures"][0], card),
        TRAINING: _json({"run": run, **card}),
    }
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        texts["model.safetensors.index.json"] = _json(index)
    return texts


def _split_files(file_tensors: dict[str, _FileTensor], dtype: np.dtype, max_bytes: int) -> Any:
    """Chooses the file of each tensor. Returns a huggingface_hub.StateDictSplit."""
    from huggingface_hub import split_state_dict_into_shards_factory

    return split_state_dict_into_shards_factory(
        file_tensors,
        get_storage_size=lambda tensor: math.prod(tensor.shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )


def _json(value: Any) -> str:
    return dumps(value, indent=2, ensure_ascii=False) + "\n"


def _reserve(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """Writes a header and allocates the tensors' space, so that a full disk is detected early."""
    header: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    dtype_name = next(name for name, numpy_name in NUMPY_NAMES.items() if numpy_name == dtype)
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # Padded with spaces to 8 bytes, as safetensors does, so that tensors are aligned.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)


@contextlib.contextmanager
def _open_reserved(path: Path) -> Iterator[BinaryIO | None]:
    """Opens a reserved file after its header, on process 0 only."""
    if not processes.is_first():
        yield None
        return
    with path.open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        yield file
        file.flush()
        os.fsync(file.fileno())


def _write(out: BinaryIO | None, array: np.ndarray) -> None:
    if out is not None:
        out.write(array.reshape(-1).view(np.uint8).data)  # bfloat16 has no buffer


def _gather(
    flat: Flat, file_tensor: _FileTensor, sizes: Mapping[str, int], rescale: float
) -> np.ndarray:
    """Copies one tensor of the file to the host, in its dtype on the devices."""
    parts = []
    for tensor in file_tensor.parts:
        array = _to_host(flat[tensor.path], copy_index(tensor, file_tensor.layer, sizes))
        # Removes the padding of the vocabulary.
        array = array[tuple(slice(sizes[axis]) for axis in tensor.axes)]
        if tensor.residual and rescale != 1.0:
            array = array.astype(np.float32) * np.float32(rescale**tensor.residual)
        merged = tensor.file_axes[::-1] if tensor.transposed else tensor.file_axes
        array = array.reshape([math.prod(sizes[axis] for axis in axes) for axes in merged])
        parts.append(array.T if tensor.transposed else array)
    if file_tensor.parts[0].per_head:
        heads = [part.reshape(-1, 1, sizes["D"], *part.shape[1:]) for part in parts]
        return np.concatenate(heads, axis=1).reshape(file_tensor.shape)
    # Parts are concatenated on the output axis.
    axis = 0 if file_tensor.parts[0].transposed else -1
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)


@jax.jit
def _take(stacked, layer):
    # The layer is an argument: a constant index would compile a program for each layer.
    return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False)


def _to_host(param: Any, index: tuple[int, ...]) -> np.ndarray:
    """Copies a parameter, or one layer or expert of it, to every host."""
    if isinstance(param, np.ndarray):
        return param[index]
    for place in index:
        param = param[place] if is_layer_list(param) else _take(param, place)
    if param.is_fully_addressable:
        return np.asarray(param)
    from jax.experimental.multihost_utils import process_allgather

    return process_allgather(param, tiled=True)


def _tokenizer_files(folder: Path) -> list[Path]:
    folder = tokenizer_folder(folder) if is_gguf(folder) else folder
    paths = {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}
    # Other matches, such as a chat template, are not a tokenizer by themselves.
    suffixes = {path.suffix for path in paths if path.name != "generation_config.json"}
    if not suffixes & {".json", ".txt", ".model"}:
        raise InputError(f"{folder} has no tokenizer; give the folder with tokenizer.json")
    return sorted(path for path in paths if path.is_file())


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Locks the folder, so that only one run at a time writes it."""
    path = target.with_name(f".{target.name}.lock")
    make_folder(target.parent)
    descriptor = acquire_lock(path, target, "use another folder")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # while it is locked: see `acquire_lock`
        os.close(descriptor)


def _check_target(target: Path, run: str) -> None:
    """Raises InputError if the folder contains files of another run or of something else."""
    marker = target / TRAINING
    is_empty = target.is_dir() and not any(target.iterdir())
    if is_empty or not os.path.lexists(target):
        return
    saved_run = read_json(marker, "a saved model").get("run") if marker.is_file() else ""
    if saved_run != run:
        content = (
            f"the model of another run ({saved_run})" if saved_run else "files of something else"
        )
        raise InputError(f"{target} contains {content}; give a new or empty folder")


def _replace_folder(partial: Path, target: Path) -> None:
    """Renames the finished folder, then deletes the one that it replaces."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        # A folder cannot be renamed to the name of one that is not empty.
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """Turns an OSError into an InputError that names the folder."""
    try:
        yield
    except OSError as error:
        raise write_error(target, error) from error


@contextlib.contextmanager
def _removed_on_failure(partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if processes.is_first():
            shutil.rmtree(partial, ignore_errors=True)
        raise
