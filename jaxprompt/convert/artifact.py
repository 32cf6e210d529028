"""The exported prompt: prompt.safetensors with the numbers, and prompt.json with its metadata.

The safetensors file is plain (any reader opens it) and the same tensors give the same bytes. The
metadata say what the numbers belong to; they hold the file's SHA-256, so that the two stay
together, and a checksum of the other fields, so that no damaged label or template goes unnoticed.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from tokenize import TokenError

import numpy as np

from jaxprompt.convert.prompt_metadata import BackboneMetadata, PromptMetadata
from jaxprompt.errors import InputError, brief
from jaxprompt.files import (
    add_checksum,
    json_checksum,
    make_folder,
    parse_json,
    user_path,
    write_atomic,
)

FORMAT = 1
# What numpy lets through of a header that is nested too deeply, or has no sizes in it.
_HEADERS = (SyntaxError, TokenError, RecursionError, MemoryError, OverflowError, TypeError)
TENSORS, METADATA = "prompt.safetensors", "prompt.json"


def write_artifact(
    folder: str | os.PathLike, tensors: Mapping[str, np.ndarray], metadata: PromptMetadata
) -> tuple[Path, Path]:
    """Writes tensors (name -> array) and their metadata into `folder`; returns both paths.

    Raises InputError when the disk refuses.
    """
    data = encode_tensors(tensors)
    metadata = dataclasses.replace(metadata, sha256=hashlib.sha256(data).hexdigest())
    document = add_checksum({"format": FORMAT, **metadata.to_json()})
    # NaN is no JSON: a document with one could not be read by other parsers.
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    folder = make_folder(folder)
    write_atomic(folder / TENSORS, data)
    # The metadata last: with the hash in it, a kill between the two is found out on reading.
    write_atomic(folder / METADATA, text)
    return folder / TENSORS, folder / METADATA


def encode_tensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Returns what prompt.safetensors holds; the same tensors give the same bytes."""
    from safetensors.numpy import save

    plain = {name: _plain(tensors[name]) for name in sorted(tensors)}
    # One metadata key only: safetensors writes several in a random order.
    return save(plain, metadata={"jaxprompt_format": str(FORMAT)})


def read_artifact(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], PromptMetadata]:
    """Reads (tensors, metadata) from a folder or from one of the two files in it.

    Raises InputError for a file that is missing, cut, foreign, of a newer format, or of another
    export than its neighbour, and for metadata that are not as they were written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    folder = user_path(path)
    folder = folder.parent if folder.name in (TENSORS, METADATA) else folder
    metadata = _read_metadata(folder / METADATA)
    data = _read_bytes(folder / TENSORS)
    try:
        tensors = load(data)
    # The last two: a type that numpy lacks.
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{folder / TENSORS} is no whole safetensors file ({error}); export or copy it again"
        ) from error
    if hashlib.sha256(data).hexdigest() != metadata.sha256:
        raise InputError(
            f"{folder / TENSORS} is not the file that {METADATA} was written for; export both again"
        )
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise InputError(f"{folder / TENSORS}: {name} holds NaN or infinity; train it again")
    return tensors, metadata


def check_fingerprint(backbone: BackboneMetadata, fingerprint: str, *, force: bool) -> bool:
    """Returns whether the prompt was learned on the weights that have this fingerprint.

    Raises InputError when it was not, unless `force`.
    """
    learned = backbone.fingerprint
    if learned != fingerprint and not force:
        own, other = map(_quantized, (learned, fingerprint))
        if own != other:
            raise InputError(
                f"the prompt was learned with quantize={own!r}, the backbone has {other!r}; "
                f"load_backbone(..., quantize={own!r})"
            )
        raise InputError(
            f"the prompt was learned on weights {learned[:12]} ({backbone.id}), "
            f"not on {fingerprint[:12]}; load that backbone, or pass --force (force=True)"
        )
    return learned == fingerprint


def _quantized(fingerprint: str) -> str:
    """Tells how weights are quantized by what stands in front of their digest."""
    kind, dash, _ = fingerprint.partition("-")
    return kind if dash else "none"


def package_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a prompt's numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("jaxprompt", "jax", "jaxlib", "flax", "optax", "numpy", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def import_npy(path: str | os.PathLike, width: int | None = None) -> np.ndarray:
    """Reads a prompt saved with numpy.save. [P, E], any float type -> float32; E = `width` if given

    Raises InputError for a file that is missing, no .npy, holds objects, or has another shape.
    """
    path = user_path(path)
    try:
        # np.load opens a zip archive too, as an object that is no array.
        with open(path, "rb") as file:
            if file.read(2) == b"PK":
                raise InputError(
                    f"{path} is an .npz archive; give one array written with numpy.save"
                )
        # Mapped, so that no more is taken than the file holds, whatever its header announces.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy advises to write a header of Python 2 anew
            prompt = np.load(path, mmap_mode="r", allow_pickle=False)
    except InputError:
        raise
    except (OSError, ValueError, EOFError, *_HEADERS) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(
            f"cannot read {path} as .npy: {' '.join(reason.split())}; write it with numpy.save"
        ) from error
    if not np.issubdtype(prompt.dtype, np.floating):
        raise InputError(f"{path} holds {prompt.dtype}; a prompt is float16, float32 or float64")
    if prompt.ndim != 2 or not prompt.size or prompt.shape[1] != (width or prompt.shape[1]):
        wanted = f"this backbone takes [length, {width}]" if width else "a prompt is [length, E]"
        raise InputError(f"{path} has shape {list(prompt.shape)}; {wanted}")
    # A copy: the mapped file is closed with the array that maps it. Made before the check: a number
    # beyond float32's range is an infinity from here on.
    with np.errstate(over="ignore"):
        rows = prompt.astype(np.float32)
    if not np.isfinite(rows).all():
        raise InputError(f"{path} holds NaN or infinity in float32; save a prompt that is finite")
    return rows


def summary_of(folder: str | os.PathLike) -> str:
    """Says what an export is of in a few words, "" where there is none that can be read."""
    try:
        export = _read_metadata(Path(folder) / METADATA)
    except InputError:
        return ""
    parts = ("name", export.task.name), ("method", export.method), ("seed", export.seed)
    summary = ", ".join(f"{name} {brief(value)}" for name, value in parts)
    return f"{summary}, numbers {str(export.sha256)[:12]}"


def write_npy(path: str | os.PathLike, prompt: np.ndarray) -> None:
    """Writes a prompt as a plain .npy, little-endian float32 in C order. [P, E]"""
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(prompt, dtype="<f4", order="C"), allow_pickle=False)
    write_atomic(path, buffer.getvalue())


def _plain(array: np.ndarray) -> np.ndarray:
    # The writer takes the bytes as they lie: C order and this machine's byte order.
    array = np.asarray(array)
    if array.dtype.kind not in "biuf":  # bfloat16 too: numpy readers cannot open it
        raise ValueError(f"an exported tensor is of a plain numpy type, not {array.dtype}")
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        inner: list[str] = []
        with contextlib.suppress(OSError):  # a folder that may not be listed
            inner = sorted(found.parent.name for found in path.parent.glob(f"*/{path.name}"))
        run = path.parent.parent
        if not inner and path.parent.name == "export" and os.path.exists(run / "config.json"):
            raise InputError(
                f"{run} has no export; run python -m jaxprompt export --workdir={run}"
            ) from error
        cure = f"it has an export of each task: give one of {', '.join(inner)} in that folder"
        if inner == ["export"]:
            cure = f"give {path.parent / 'export'}, which is there"
        raise InputError(
            f"cannot read {path}: {error.strerror}; "
            f"{cure if inner else 'give the folder that `export` wrote'}"
        ) from error


def _read_metadata(path: Path) -> PromptMetadata:
    data = _read_bytes(path)  # outside: what it raises is a ValueError too
    try:
        values = parse_json(data)
    except ValueError as error:
        raise InputError(f"{path} is no whole JSON ({error}); export or copy it again") from error
    if not isinstance(values, dict) or "format" not in values:
        raise InputError(
            f"{path} is not the metadata of a prompt; give the folder that `export` wrote"
        )
    if values.get("checksum", json_checksum(values)) != json_checksum(values):
        raise InputError(
            f"{path} is damaged or was edited: its contents do not match its checksum; export the "
            "prompt again"
        )
    if values["format"] != FORMAT:
        raise InputError(
            f"{path} has format {brief(values['format'])}, this version reads {FORMAT}; "
            "update jaxprompt"
        )
    for name in ("sha256", "checksum"):
        if name not in values:
            raise InputError(f"{path}: {name} is missing; export the prompt again")
    return PromptMetadata.from_json(values, path)
