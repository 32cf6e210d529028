"""Exports the tuned weights of a backbone: as differences, or as a folder for transformers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxprompt import tree
from jaxprompt.build.backbone import LoadedBackbone
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.convert.save import check_loadable, save_backbone
from jaxprompt.errors import InputError

_TUNED, _DELTA, _ROWS = "backbone/", "delta/", "delta_rows/"
_LARGEST = float(np.finfo(np.float16).max)


class Delta(NamedTuple):
    """Tensors with the backbone's as differences, and the error and size of these."""

    tensors: dict[str, np.ndarray]
    before: int  # bytes of the tuned weights
    after: int  # bytes of their differences
    error: float  # the largest difference of a weight that is read back


def tuned_names(tensors: Iterable[str]) -> list[str]:
    """Lists the backbone weights in an export, in full or as differences."""
    own = [name for name in tensors if name.startswith((_TUNED, _DELTA + _TUNED))]
    return sorted(name.removeprefix(_DELTA) for name in own)


def to_delta(tensors: Mapping[str, np.ndarray], whole: LoadedBackbone, flag: str) -> Delta:
    """Replaces tuned weights by their differences from the backbone.

    A difference is float16, with an error of at most 2**-11 of it or 3e-8. For a table of which
    less than half of the rows changed, delta_rows/NAME int32 [R] lists these rows and
    delta/NAME [R, ...] contains only them.

    Raises:
      InputError: names `flag`; if no backbone weight was tuned, the backbone is not loaded in
        float32, or a difference exceeds the range of float16.
    """
    base, found = tree.flatten({"backbone": whole.loaded.params}), dict(tensors)
    names = _require_tuned(tensors, flag)
    if (dtype := whole.backbone.config.dtype) != "float32":
        raise InputError(
            f"{flag}: differences need float32 weights, but the backbone is loaded in "
            f"{dtype}; load it with dtype=float32"
        )
    before = after = 0
    error = 0.0
    for name in names:
        end = found.pop(name)
        start = np.asarray(base[name], np.float32)[: len(end)]  # without rows that fill up a mesh
        moved = end - start
        if np.abs(moved).max(initial=0.0) > _LARGEST:
            raise InputError(f"{flag}: {name} moved by more than {_LARGEST:g}; export without it")
        rows = np.flatnonzero(moved.reshape(len(moved), -1).any(axis=1)).astype(np.int32)
        parts: dict[str, np.ndarray] = {_DELTA + name: moved.astype(np.float16)}
        if moved.ndim > 1 and 2 * len(rows) < len(moved):
            parts = {_DELTA + name: moved[rows].astype(np.float16), _ROWS + name: rows}
        # What a reader will get, to tell how far the rounding moves it.
        back = _add_delta(start, parts[_DELTA + name], parts.get(_ROWS + name))
        error = max(error, float(np.abs(back - end).max(initial=0.0)))
        before, after = before + end.nbytes, after + sum(x.nbytes for x in parts.values())
        found |= parts
    return Delta(found, before, after, error)


def from_delta(
    path: str, tensors: Mapping[str, np.ndarray], base: tree.Flat, vocab: int
) -> dict[str, np.ndarray]:
    """Replaces differences by tuned weights in float32; the inverse of `to_delta`.

    Args:
      path: the export, for messages.
      tensors: its tensors.
      base: the backbone's weights by flat name.
      vocab: the size of the vocabulary; tables that are padded for a mesh are padded with zeros.

    Raises:
      InputError: if a difference does not fit the weights, or these are not in float32.
    """
    found = {name: x for name, x in tensors.items() if not name.startswith((_DELTA, _ROWS))}
    for key in sorted(tensors.keys() - found.keys()):
        name = key.removeprefix(_DELTA).removeprefix(_ROWS)
        if name not in base or _DELTA + name not in tensors:
            raise InputError(f"{path} has the unknown tensor {key!r}; export the prompt again")
        if base[name].dtype != np.float32:  # rounded: the sum would not be what was trained
            raise InputError(
                f"{path} contains differences from float32 weights, but the backbone is loaded in "
                f"{base[name].dtype}; load it with dtype=float32, or export without --delta"
            )
        start, rows = np.asarray(base[name]), tensors.get(_ROWS + name)
        moved = tensors[_DELTA + name]
        if rows is None and moved.shape[:1] == (vocab,):
            start = start[:vocab]
        wanted = (start if rows is None else start[: len(rows)]).shape
        within = rows is None or (
            rows.ndim == 1 and rows.min(initial=0) >= 0 and rows.max(initial=-1) < len(start)
        )
        if moved.shape != wanted or not within:
            raise InputError(
                f"{path}: {_DELTA}{name} is {list(moved.shape)}, but the backbone needs "
                f"{list(wanted)} and row numbers below {len(start)}; export the prompt again"
            )
        found[name] = _add_delta(start, moved, rows)
    return {name: _pad_vocab(x, base.get(name), vocab) for name, x in found.items()}


def _pad_vocab(x: np.ndarray, leaf: jax.Array | None, vocab: int) -> np.ndarray:
    """Adds zero rows to a table of the vocabulary, up to those that the backbone has there."""
    if leaf is None or x.shape[:1] != (vocab,) or len(leaf) <= vocab:
        return x
    return np.pad(x, [(0, len(leaf) - vocab), *[(0, 0)] * (x.ndim - 1)])


def _require_tuned(tensors: Mapping[str, np.ndarray], flag: str) -> list[str]:
    """Lists the tuned weights. Raises InputError, which names `flag`, where there are none."""
    if names := [name for name in tensors if name.startswith(_TUNED)]:
        return names
    if tuned_names(tensors):
        raise InputError(f"{flag}: the prompt already contains differences; save it without {flag}")
    raise InputError(f"{flag}: the run did not tune the backbone; export without it")


def _add_delta(start: np.ndarray, moved: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    if rows is None:
        return start + moved.astype(np.float32)
    # The backbone's own array may be shared with other prompts.
    whole = start.copy()
    whole[rows] += moved.astype(np.float32)
    return whole


def save_tuned(
    folder: str | Path, tensors: Mapping[str, np.ndarray], metadata: PromptMetadata,
    whole: LoadedBackbone, run: str, flag: str,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Writes the tuned backbone as a folder that transformers loads; returns the other tensors.

    `run` identifies the run that the folder belongs to, as in `save_backbone`.

    Raises:
      InputError: as `save_backbone`; also, naming `flag`, if no backbone weight was tuned.
    """
    _require_tuned(tensors, flag)
    check_loadable(whole.backbone.family, f"export without {flag}, or with --delta")
    base = tree.flatten({"backbone": whole.loaded.params})
    if any(map(tree.is_plane, base)):
        raise InputError(
            f"{flag} needs float weights, but the backbone of this run is quantised "
            f"(backbone.quantize={whole.backbone.config.quantize}); export without {flag}"
        )
    own = {name: x for name, x in tensors.items() if name.startswith(_TUNED)}
    told = {
        "task": metadata.task.name,
        "method": metadata.method,
        "start": f"{metadata.backbone.id} ({metadata.backbone.fingerprint[:12]})",
        "seed": metadata.seed,
        "metrics": metadata.metrics,
    }
    opened = whole.backbone
    save_backbone(
        folder, opened.family, opened.hf, tree.unflatten(base | own)["backbone"],
        tokenizer=opened.folder, card=told, run=run, rescale=opened.config.rescale,
    )  # fmt: skip
    return {name: x for name, x in tensors.items() if name not in own}
