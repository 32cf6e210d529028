"""Writes a backbone as a folder that transformers loads: the inverse of load.py, by its tables.

The files are written to a temporary folder, which is renamed once it is complete. All processes
that share the parameters must call together; process 0 writes.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from jaxprompt.convert.artifact import package_versions
from jaxprompt.convert.card import render_card
from jaxprompt.convert.folder import TOKENIZER_FILES
from jaxprompt.convert.load import DTYPES
from jaxprompt.convert.shapes import axis_sizes, copies, family_of, file_shape, names_of, select
from jaxprompt.convert.tensors import Family, Tensor
from jaxprompt.convert.weights import NUMPY_NAMES
from jaxprompt.data.text.gguf_header import is_gguf
from jaxprompt.data.text.gguf_tokenizer import tokenizer_folder
from jaxprompt.errors import InputError, with_article
from jaxprompt.files import acquire_lock, dumps, make_folder, read_json, write_atomic, write_error
from jaxprompt.parallel import processes
from jaxprompt.tree import Flat, Params, flatten

FILE_BYTES = 5 * 10**9
TRAINING = "training.json"  # the run that a folder belongs to, and its card for programs
# Of a config: what transformers writes anew, and what no longer holds of the saved weights.
_RENEWED = (
    "architectures", "auto_map", "dtype", "quantization_config", "torch_dtype",
    "transformers_version", "_name_or_path",
)  # fmt: skip


class _Entry(NamedTuple):
    """One tensor of the file, and the parameters that are concatenated in it."""

    parts: list[Tensor]
    layer: int
    shape: tuple[int, ...]


def save_backbone(
    folder: str | Path, family: str, config: Mapping[str, Any], params: Params, *,
    tokenizer: str | Path, card: Mapping[str, Any], run: str, dtype: str = "float32",
    rescale: float = 1.0, file_bytes: int = FILE_BYTES,
) -> Path:  # fmt: skip
    """Writes weights, config.json, tokenizer and model card.

    Args:
      folder: where to write; a folder that the same run wrote is replaced.
      family: the backbone family.
      config: a transformers config.json.
      params: a nested dict as load_backbone returns it, of arrays on any mesh, with the heads to
        save. Padding of the vocabulary is removed and a T5's `rescale` is undone.
      tokenizer: the folder, or .gguf file, whose tokenizer is copied.
      card: the contents of the model card, see card.py.
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
    table = family_of(family)
    flat, sizes = flatten(params), axis_sizes(config, table)
    heads = [head for head in table.heads if head in params] + list(table.always)
    tied = table.decoder.path not in flat
    tensors = select(table, config, sizes, heads, tied=tied)
    _check_complete(flat, tensors, sizes)
    entries = _entries(table, tensors, sizes, tied=tied)
    files = _divide(entries, DTYPES[dtype], file_bytes)
    # Before anything is written: a config that transformers refuses ends it here.
    saved = describe(family, config, heads, dtype)
    card = {**card, "versions": package_versions()}
    texts = {
        "README.md": render_card(Path(folder).name, saved["architectures"][0], card),
        TRAINING: _json({"run": run, **card}),
    }
    if len(files) > 1:
        texts["model.safetensors.index.json"] = _json(_index(files, entries, DTYPES[dtype]))

    target = Path(os.path.abspath(folder))
    partial = target.with_name(f".{target.name}.partial")

    def prepare() -> None:
        _check_free(target, run)
        found = _tokenizer_files(Path(tokenizer))
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(target.parent)
        partial.mkdir()  # fails on a link planted there
        for path in found:
            shutil.copyfile(path, partial / path.name)
        for name, text in texts.items():
            write_atomic(partial / name, text)
        for name, names in files.items():
            _reserve(partial / name, {n: entries[n].shape for n in names}, dtype)

    def finish() -> None:
        # Last: what a killed write leaves behind cannot be loaded.
        write_atomic(partial / "config.json", _json(saved))
        _take_place(partial, target)

    with _held(target), _removed_on_failure(partial, target):
        processes.on_first(_told(prepare, target))
        for file, names in files.items():
            with _opened(partial / file) as out:
                for name in names:
                    # A collective: all processes run this loop alike, and the first writes.
                    array = _gather(flat, entries[name], sizes, rescale)
                    if out is not None:
                        array = array.astype(DTYPES[dtype], order="C", copy=False)
                        out.write(array.reshape(-1).view(np.uint8).data)  # bfloat16 has no buffer
        processes.on_first(_told(finish, target))
    return Path(folder)


def check_loadable(family: str, cure: str) -> None:
    """Raises InputError, which ends with `cure`, if transformers has no class for a family."""
    if not family_of(family).classes:
        raise InputError(f"transformers has no class that loads {with_article(family)}; {cure}")


def describe(
    family: str, config: Mapping[str, Any], heads: Collection[str], dtype: str = "float32"
) -> dict[str, Any]:
    """Returns the config.json of saved weights, with the class of transformers that loads them.

    The config class of transformers fills in missing fields; those of `config` stay as they are.

    Raises:
      InputError: if that class rejects the config.
    """
    from transformers import AutoConfig

    kind = config.get("model_type") or family
    given = {name: value for name, value in config.items() if name not in _RENEWED}
    given["model_type"] = kind
    try:
        filled = AutoConfig.for_model(**given)
    # Strict data classes, validators and lookups of names each raise a class of their own.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"transformers rejects the config ({reason}); give the config.json of a {kind}"
        ) from error
    # Not by transformers' own tables of classes: those can be read only where torch is installed.
    classes = family_of(family).classes
    ending = next((classes[head] for head in classes if head in heads), "Model")
    # The class of Gemma 3's text model has another name than that of its config.
    name = type(filled).__name__.removesuffix("Config").removesuffix("Text") + ending
    own = json.loads(filled.to_json_string())
    # The config replaces the class's defaults, and what is renewed replaces both.
    return own | given | {"architectures": [name], "dtype": dtype}


def _check_complete(flat: Flat, tensors: list[Tensor], sizes: Mapping[str, int]) -> None:
    """Raises ValueError where the parameters are not those of the config."""
    wanted = {tensor.path: tensor for tensor in tensors}
    differing = sorted(wanted.keys() ^ flat.keys())
    for name in wanted.keys() & flat.keys():
        axes, shape = wanted[name].stack + wanted[name].axes, flat[name].shape
        own = tuple(sizes[axis] for axis in axes)
        padded = axes[0] == "V" and shape[:1] > own[:1]
        if shape != own and not (padded and shape[1:] == own[1:]):
            differing.append(name)
    if differing:
        raise ValueError(f"parameters and config differ in {', '.join(differing[:5])}")


def _entries(
    table: Family, tensors: list[Tensor], sizes: Mapping[str, int], *, tied: bool
) -> dict[str, _Entry]:
    """Finds what stands where. -> {name in the file: entry}"""
    with_head = any(t.outside or t.path.startswith(("mlm/", "rtd/")) for t in tensors)
    prefix = table.prefix if (with_head or table.always) and not table.bare else ""
    entries: dict[str, _Entry] = {}
    for tensor in tensors:
        for layer in range(copies(tensor, sizes)):
            names = names_of(tensor, layer, prefix, sizes.get("I", 1))
            # Torch's untied decoder adds a bias of its own; the other is a parameter all the same.
            for name in names if tensor.path == "mlm/bias" and not tied else names[-1:]:
                entry = entries.setdefault(name, _Entry([], layer, file_shape(tensor, sizes)))
                entry.parts.append(tensor)
    return entries


def _divide(entries: Mapping[str, _Entry], dtype: np.dtype, limit: int) -> dict[str, list[str]]:
    """Fills files in turn. -> {file: names of its tensors}"""
    groups: list[list[str]] = [[]]
    size = 0
    for name, entry in entries.items():
        own = math.prod(entry.shape) * dtype.itemsize
        if groups[-1] and size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += own
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _index(
    files: Mapping[str, list[str]], entries: Mapping[str, _Entry], dtype: np.dtype
) -> dict[str, Any]:
    where = {name: file for file, names in files.items() for name in names}
    size = sum(math.prod(entry.shape) for entry in entries.values()) * dtype.itemsize
    return {"metadata": {"total_size": size}, "weight_map": where}


def _json(value: Any) -> str:
    return dumps(value, indent=2, ensure_ascii=False) + "\n"


def _reserve(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """Writes a header and takes the room of the tensors: a full disk is known before any work."""
    header: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    kind = next(name for name, known in NUMPY_NAMES.items() if known == dtype)
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # Padded with spaces to 8 bytes, as safetensors does, so that tensors are aligned.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | None]:
    """Opens a reserved file behind its header, on process 0 alone."""
    if not processes.is_first():
        yield None
        return
    with path.open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        yield file
        file.flush()
        os.fsync(file.fileno())


def _gather(flat: Flat, entry: _Entry, sizes: Mapping[str, int], rescale: float) -> np.ndarray:
    """Brings one tensor of the file to the host, in the dtype that it has on the devices."""
    parts = []
    for tensor in entry.parts:
        array = _fetch(flat[tensor.path], entry.layer if tensor.stack else None)
        # Only a vocabulary is padded; all other axes are whole.
        array = array[tuple(slice(sizes[axis]) for axis in tensor.axes)]
        if tensor.residual and rescale != 1.0:
            array = array.astype(np.float32) * np.float32(rescale**tensor.residual)
        merged = tensor.file_axes[::-1] if tensor.transposed else tensor.file_axes
        array = array.reshape([math.prod(sizes[axis] for axis in axes) for axes in merged])
        parts.append(array.T if tensor.transposed else array)
    # Parts stand side by side on the axis of the outputs, wherever the file has it.
    axis = 0 if entry.parts[0].transposed else -1
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)


@jax.jit
def _take(stacked, layer):
    # The layer is an argument: indexing by a constant would compile a program for each.
    return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False)


def _fetch(leaf: Any, layer: int | None) -> np.ndarray:
    """Brings a parameter, or one layer of it, to every host."""
    if isinstance(leaf, np.ndarray):
        return leaf if layer is None else leaf[layer]
    leaf = leaf if layer is None else _take(leaf, layer)
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    from jax.experimental.multihost_utils import process_allgather

    return process_allgather(leaf, tiled=True)


def _tokenizer_files(folder: Path) -> list[Path]:
    folder = tokenizer_folder(folder) if is_gguf(folder) else folder
    found = {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}
    # Other files of the patterns, as a chat template, are no tokenizer by themselves.
    kinds = {path.suffix for path in found if path.name != "generation_config.json"}
    if not kinds & {".json", ".txt", ".model"}:
        raise InputError(f"{folder} has no tokenizer; give the folder with tokenizer.json")
    return sorted(path for path in found if path.is_file())


@contextlib.contextmanager
def _held(target: Path) -> Iterator[None]:
    """Locks the folder, so that only one run at a time writes it."""
    path = target.with_name(f".{target.name}.lock")

    @contextlib.contextmanager
    def hold() -> Iterator[None]:
        make_folder(target.parent)
        held = acquire_lock(path, target, "use another folder")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()  # while it is held: see `acquire_lock`
            os.close(held)

    with contextlib.ExitStack() as stack:
        processes.on_first(lambda: stack.enter_context(hold()))
        yield


def _check_free(target: Path, run: str) -> None:
    """Raises InputError if the folder contains files of another run or of something else."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        marker = target / TRAINING
        own = read_json(marker, "a saved model").get("run") if marker.is_file() else None
        if own != run:
            what = f"the model of another run ({own})" if own else "files of something else"
            held = f"contains {what}" if target.is_dir() else "is a file"
            raise InputError(f"{target} {held}; give a new or empty folder")


def _take_place(partial: Path, target: Path) -> None:
    """Renames the finished folder; one that was there goes when the new one stands."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        # A folder cannot be renamed onto one that is not empty.
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _told(action: Callable[[], None], target: Path) -> Callable[[], None]:
    """Makes an action's OSError the one line that names the folder."""

    def act() -> None:
        try:
            action()
        except OSError as error:
            raise write_error(target, error) from error

    return act


@contextlib.contextmanager
def _removed_on_failure(partial: Path, target: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if processes.is_first():
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise write_error(target, error) from error
        raise
