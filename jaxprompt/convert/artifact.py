"""The exported prompt: prompt.safetensors with the tensors, and prompt.json with the metadata.

The safetensors file is plain (any reader opens it), and the same tensors give the same bytes. The
metadata describe what the tensors belong to. They contain the SHA-256 of the tensor file, which
ties the two files together, and a checksum of the other fields, which reveals damaged labels or
templates.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxprompt.convert.prompt_metadata import BackboneMetadata, PromptMetadata
from jaxprompt.errors import InputError, brief, first_line
from jaxprompt.files import (
    add_checksum,
    make_folder,
    open_regular,
    pop_checksum,
    read_bytes,
    read_json,
    user_path,
    write_atomic,
)

FORMAT = 1
TENSORS, METADATA = "prompt.safetensors", "prompt.json"


def write_artifact(
    folder: str | os.PathLike, tensors: Mapping[str, np.ndarray], metadata: PromptMetadata
) -> tuple[Path, Path]:
    """Writes tensors and their metadata into a folder.

    Args:
      folder: where to write.
      tensors: arrays by name.
      metadata: what the tensors belong to.

    Returns:
      The paths of the two files.

    Raises:
      InputError: if the files cannot be written.
    """
    data = encode_tensors(tensors)
    metadata = dataclasses.replace(metadata, sha256=hashlib.sha256(data).hexdigest())
    document = add_checksum({"format": FORMAT, **metadata.to_json()})
    # NaN is not valid JSON, and other parsers refuse it.
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    folder = make_folder(folder)
    write_atomic(folder / TENSORS, data)
    # The metadata last: its hash reveals on reading that a kill came between the two.
    write_atomic(folder / METADATA, text)
    return folder / TENSORS, folder / METADATA


def encode_tensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Returns the bytes of prompt.safetensors; the same tensors give the same bytes."""
    from safetensors.numpy import save

    arrays = {name: _native_array(tensors[name]) for name in sorted(tensors)}
    # One metadata key only: safetensors writes several in a random order.
    return save(arrays, metadata={"jaxprompt_format": str(FORMAT)})


def read_artifact(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], PromptMetadata]:
    """Reads an export.

    Args:
      path: the folder, or one of the two files in it.

    Returns:
      (tensors by name, metadata).

    Raises:
      InputError: if a file is missing, damaged, not ours or of a newer format, or if the two files
        are from different exports.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    folder = user_path(path)
    folder = folder.parent if folder.name in (TENSORS, METADATA) else folder
    metadata = read_metadata(folder)
    try:
        data = read_bytes(folder / TENSORS)
    except OSError as error:
        raise InputError(
            f"cannot read {folder / TENSORS}: {error.strerror}; export or copy it again"
        ) from error
    if hashlib.sha256(data).hexdigest() != metadata.sha256:
        raise InputError(
            f"{folder / TENSORS} is damaged, or from another export than {METADATA}; export or "
            "copy both again"
        )
    try:
        return load(data), metadata
    except (SafetensorError, KeyError) as error:  # a KeyError for a dtype that numpy lacks
        raise InputError(
            f"{folder / TENSORS} cannot be read as numpy arrays ({error}); export the prompt again"
        ) from error


def check_fingerprint(backbone: BackboneMetadata, fingerprint: str, *, force: bool) -> bool:
    """Returns whether the prompt was trained on the weights that have this fingerprint.

    Raises:
      InputError: if it was trained on other weights and `force` is False.
    """
    trained_on = backbone.fingerprint
    if trained_on != fingerprint and not force:
        trained, loaded = map(_quantization, (trained_on, fingerprint))
        if trained != loaded:
            raise InputError(
                f"the prompt was trained with quantize={trained!r}, but the backbone is loaded "
                f"with quantize={loaded!r}; use load_backbone(..., quantize={trained!r})"
            )
        raise InputError(
            f"the prompt was trained on the weights {trained_on[:12]} ({backbone.id}), "
            f"not on {fingerprint[:12]}; load that backbone, or pass --force (force=True)"
        )
    return trained_on == fingerprint


def _quantization(fingerprint: str) -> str:
    """Returns how the weights are quantised, from the prefix of their fingerprint."""
    prefix, dash, _ = fingerprint.partition("-")
    return prefix if dash else "none"


def package_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect a prompt's values."""
    versions = {"python": platform.python_version()}
    for name in ("jaxprompt", "jax", "jaxlib", "flax", "optax", "numpy", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def import_npy(path: str | os.PathLike, width: int | None = None) -> np.ndarray:
    """Reads a prompt that was saved with numpy.save.

    Args:
      path: a .npy file of [P, E], of any float type.
      width: the embedding width E that is required, if any.

    Returns:
      The prompt as float32, [P, E].

    Raises:
      InputError: if the file is missing, is not a .npy file of floats, or has another shape.
    """
    path = user_path(path)
    try:
        with open_regular(path) as file:
            prompt = np.load(file, allow_pickle=False)
    except Exception as error:  # numpy evaluates the header, which raises a dozen classes
        raise InputError(
            f"cannot read {path} as .npy ({first_line(error)}); save it with numpy.save"
        ) from error
    if not isinstance(prompt, np.ndarray) or prompt.dtype.kind != "f":
        raise InputError(f"{path} is not a single array of floats; save it with numpy.save")
    if prompt.ndim != 2 or not prompt.size or prompt.shape[1] != (width or prompt.shape[1]):
        raise InputError(f"{path} has shape {list(prompt.shape)}; use [length, {width or 'width'}]")
    # Before the check, because values beyond float32's range become infinite.
    with np.errstate(over="ignore"):
        vectors = prompt.astype(np.float32)
    if not np.isfinite(vectors).all():
        raise InputError(f"{path} contains NaN or infinity as float32; save finite values")
    return vectors


def export_summary(folder: str | os.PathLike) -> str:
    """Returns a one-line summary of an export, "" if there is no readable export."""
    try:
        metadata = read_metadata(Path(folder))
    except InputError:
        return ""
    fields = ("name", metadata.task.name), ("method", metadata.method), ("seed", metadata.seed)
    summary = ", ".join(f"{name} {brief(value)}" for name, value in fields)
    return f"{summary}, parameters {str(metadata.sha256)[:12]}"


def write_npy(path: str | os.PathLike, prompt: np.ndarray) -> None:
    """Writes a prompt as a plain .npy, little-endian float32 in C order. [P, E]"""
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(prompt, dtype="<f4", order="C"), allow_pickle=False)
    write_atomic(path, buffer.getvalue())


def _native_array(array: np.ndarray) -> np.ndarray:
    """Returns an array in C order and the machine's byte order, as safetensors needs it."""
    array = np.asarray(array)
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")


def read_metadata(folder: Path) -> PromptMetadata:
    """Reads the metadata of an export. Raises InputError if they were edited."""
    path = folder / METADATA
    exports = sorted(str(match.parent) for match in folder.glob(f"*/{METADATA}"))
    values = read_json(path, " or ".join(exports) or "the folder that `export` wrote")
    if values.get("format") != FORMAT:
        raise InputError(
            f"{path} has format {brief(values.get('format'))}, but this version reads format "
            f"{FORMAT}; update jaxprompt, or export the prompt again"
        )
    if not pop_checksum(values):
        raise InputError(
            f"{path} is damaged or was edited: its contents do not match its checksum; export the "
            "prompt again"
        )
    return PromptMetadata.from_json(values, path)
