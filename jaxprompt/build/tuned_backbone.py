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
from jaxprompt.errors import InputError, check_rules

_BACKBONE, _DELTA, _DELTA_ROWS = "backbone/", "delta/", "delta_rows/"
_FLOAT16_MAX = float(np.finfo(np.float16).max)


class Delta(NamedTuple):
    """Tensors whose backbone weights are differences, and the size and error of these."""

    tensors: dict[str, np.ndarray]
    before: int  # bytes of the tuned weights
    after: int  # bytes of their differences
    error: float  # the largest absolute rounding error of a restored weight


def tuned_names(tensors: Iterable[str]) -> list[str]:
    """Lists the backbone weights in an export, in full or as differences."""
    return sorted(
        name.removeprefix(_DELTA)
        for name in tensors
        if name.startswith((_BACKBONE, _DELTA + _BACKBONE))
    )


def to_delta(tensors: Mapping[str, np.ndarray], backbone: LoadedBackbone, flag: str) -> Delta:
    """Replaces tuned weights by their differences from the backbone.

    A difference is float16, with an error of at most 2**-11 of it or 3e-8. For a table of which
    less than half of the rows changed, delta_rows/NAME int32 [R] lists these rows and
    delta/NAME [R, ...] contains only them.

    Raises:
      InputError: names `flag`; if no backbone weight was tuned, the backbone is not loaded in
        float32, or a difference exceeds the range of float16.
    """
    base, result = tree.flatten({"backbone": backbone.loaded.params}), dict(tensors)
    names = _require_tuned(tensors, flag)
    if (dtype := backbone.backbone.config.dtype) != "float32":
        raise InputError(
            f"{flag}: differences need float32 weights, but the backbone is loaded in "
            f"{dtype}; load it with dtype=float32"
        )
    before = after = 0
    error = 0.0
    for name in names:
        tuned = result.pop(name)
        original = np.asarray(base[name], np.float32)[: len(tuned)]  # without padding for a mesh
        difference = tuned - original
        if np.abs(difference).max(initial=0.0) > _FLOAT16_MAX:
            raise InputError(
                f"{flag}: {name} moved by more than {_FLOAT16_MAX:g}; export without it"
            )
        is_changed = difference.reshape(len(difference), -1).any(axis=1)
        changed_rows = np.flatnonzero(is_changed).astype(np.int32)
        parts: dict[str, np.ndarray] = {_DELTA + name: difference.astype(np.float16)}
        if difference.ndim > 1 and 2 * len(changed_rows) < len(difference):
            parts = {
                _DELTA + name: difference[changed_rows].astype(np.float16),
                _DELTA_ROWS + name: changed_rows,
            }
        restored = _add_delta(original, parts[_DELTA + name], parts.get(_DELTA_ROWS + name))
        error = max(error, float(np.abs(restored - tuned).max(initial=0.0)))
        before, after = before + tuned.nbytes, after + sum(x.nbytes for x in parts.values())
        result |= parts
    return Delta(result, before, after, error)


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
    result = {name: x for name, x in tensors.items() if not name.startswith((_DELTA, _DELTA_ROWS))}
    for key in sorted(tensors.keys() - result.keys()):
        name = key.removeprefix(_DELTA).removeprefix(_DELTA_ROWS)
        if name not in base or _DELTA + name not in tensors:
            raise InputError(f"{path} has the unknown tensor {key!r}; export the prompt again")
        if base[name].dtype != np.float32:  # rounded: the sum would not be what was trained
            raise InputError(
                f"{path} contains differences from float32 weights, but the backbone is loaded in "
                f"{base[name].dtype}; load it with dtype=float32, or export without --delta"
            )
        original, rows = np.asarray(base[name]), tensors.get(_DELTA_ROWS + name)
        difference = tensors[_DELTA + name]
        if rows is None and difference.shape[:1] == (vocab,):
            original = original[:vocab]
        expected_shape = (original if rows is None else original[: len(rows)]).shape
        valid_rows = rows is None or (
            rows.ndim == 1 and rows.min(initial=0) >= 0 and rows.max(initial=-1) < len(original)
        )
        if difference.shape != expected_shape or not valid_rows:
            raise InputError(
                f"{path}: {_DELTA}{name} is {list(difference.shape)}, but the backbone needs "
                f"{list(expected_shape)} and row numbers below {len(original)}; export the prompt "
                "again"
            )
        result[name] = _add_delta(original, difference, rows)
    return {name: _pad_vocab(x, base.get(name), vocab) for name, x in result.items()}


def _pad_vocab(x: np.ndarray, leaf: jax.Array | None, vocab: int) -> np.ndarray:
    """Pads a table of the vocabulary with zero rows to the size of the backbone's."""
    if leaf is None or x.shape[:1] != (vocab,) or len(leaf) <= vocab:
        return x
    return np.pad(x, [(0, len(leaf) - vocab), *[(0, 0)] * (x.ndim - 1)])


def _require_tuned(tensors: Mapping[str, np.ndarray], flag: str) -> list[str]:
    """Lists the tuned weights. Raises InputError, which names `flag`, where there are none."""
    names = [name for name in tensors if name.startswith(_BACKBONE)]
    rules = {
        f"{flag}: the prompt already contains differences; save it without {flag}": (
            not names and tuned_names(tensors)
        ),
        f"{flag}: the run did not tune the backbone; export without it": not names,
    }
    check_rules(rules)
    return names


def _add_delta(original: np.ndarray, difference: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    if rows is None:
        return original + difference.astype(np.float32)
    # Copied: other prompts may share the backbone's array.
    result = original.copy()
    result[rows] += difference.astype(np.float32)
    return result


def save_tuned(
    folder: str | Path,
    tensors: Mapping[str, np.ndarray],
    metadata: PromptMetadata,
    loaded: LoadedBackbone,
    run: str,
    flag: str,
) -> dict[str, np.ndarray]:
    """Writes the tuned backbone as a folder that transformers loads; returns the other tensors.

    `run` identifies the run that the folder belongs to, as in `save_backbone`.

    Raises:
      InputError: as `save_backbone`; also, naming `flag`, if no backbone weight was tuned.
    """
    _require_tuned(tensors, flag)
    check_loadable(loaded.backbone.family, f"export without {flag}, or with --delta")
    base = tree.flatten({"backbone": loaded.loaded.params})
    if any(map(tree.is_plane, base)):
        raise InputError(
            f"{flag} needs float weights, but the backbone of this run is quantised "
            f"(backbone.quantize={loaded.backbone.config.quantize}); export without {flag}"
        )
    tuned = {name: x for name, x in tensors.items() if name.startswith(_BACKBONE)}
    card = {
        "task": metadata.task.name,
        "method": metadata.method,
        "start": f"{metadata.backbone.id} ({metadata.backbone.fingerprint[:12]})",
        "seed": metadata.seed,
        "metrics": metadata.metrics,
    }
    backbone = loaded.backbone
    save_backbone(
        folder,
        backbone.family,
        backbone.hf,
        tree.unflatten(base | tuned)["backbone"],
        tokenizer=backbone.folder,
        card=card,
        run=run,
        rescale=backbone.config.rescale,
    )
    return {name: x for name, x in tensors.items() if name not in tuned}
