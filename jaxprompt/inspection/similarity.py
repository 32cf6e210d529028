"""Compares exported prompts by the cosine similarity of their mean tokens."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.build.prompt_artifact import read_export
from jaxprompt.convert.artifact import METADATA
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.errors import InputError
from jaxprompt.files import user_path, write_atomic
from jaxprompt.inspection.pictures import draw_similarity


class Similarity(NamedTuple):
    """Cosine similarities between prompts."""

    names: list[str]  # of the exports, relative to their folder
    cosines: np.ndarray  # float64 [N, N]


def mean_token(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the mean over the tokens of a prompt: soft tokens, and keys and values per layer.

    Label rows are not tokens of the input and are left out.

    Returns:
      The means, concatenated, [X]; [] for a prompt without tokens.
    """
    parts = []
    for name in sorted(tensors):
        if name.endswith("slots"):
            parts.append(tensors[name].mean(0))  # [S, E]
        elif name in ("prompt/k", "prompt/v") or name.endswith(("_k", "_v")):
            parts.append(tensors[name].mean(1).ravel())  # [L, P, N, D]
    return np.concatenate([np.zeros(0), *parts]).astype(np.float64)


def comparison_key(metadata: PromptMetadata) -> dict[str, str]:
    """Returns what prompts must have in common to be compared."""
    layers = []
    prompt: Mapping[str, Any] = metadata.prompt.fields
    for name, value in prompt.items():
        stem, first = name.removesuffix("last"), prompt.get(f"{name.removesuffix('last')}first", 0)
        if stem != name and value > first:  # of a folded prompt, half-open
            layers.append(f"{stem}{first + 1}-{value}")
        elif name.endswith("layers") and value:
            layers.append(f"{name.removesuffix('layers')}{value}")
    return {
        "backbone": metadata.backbone.fingerprint[:12],
        "method": metadata.method,
        "layers": ", ".join(layers) or "none",
    }


def compare_exports(folder: str) -> Similarity:
    """Compares all exports in a folder with each other.

    Raises:
      InputError: for fewer than two exports, and if their backbones, methods, layers or widths
        differ.
    """
    root = user_path(folder)
    paths = sorted(Path(path) for path, _, files in os.walk(root) if METADATA in files)
    if len(paths) < 2:
        raise InputError(
            f"--exports={folder} contains {len(paths)} exports; give a folder of several"
        )
    means, kinds = [], []
    for path in paths:
        tensors, metadata = read_export(str(path))
        means.append(mean_token(tensors))
        kinds.append(comparison_key(metadata))
        if not len(means[-1]):
            raise InputError(
                f"{path} contains a prompt of {metadata.method} without tokens; remove it"
            )
        kinds[-1]["values per token"] = f"{len(means[-1]):,}"
        for name, value in kinds[-1].items():
            if value != kinds[0][name]:
                raise InputError(
                    f"{path} has {name} {value}, {paths[0]} has {kinds[0][name]}; give prompts of "
                    "one method in the same layers of one backbone"
                )
    unit_means = np.stack(means)
    unit_means /= np.maximum(np.linalg.norm(unit_means, axis=1, keepdims=True), 1e-30)
    return Similarity([str(path.relative_to(root)) for path in paths], unit_means @ unit_means.T)


def write_similarity(similarity: Similarity, folder: str) -> list[Path]:
    """Writes the figure and the cosines to the folder. Returns the paths."""
    root = user_path(folder)
    values = {"exports": similarity.names, "cosines": similarity.cosines.tolist()}
    write_atomic(root / "similarity.json", json.dumps(values, ensure_ascii=False) + "\n")
    picture = draw_similarity(similarity.cosines, similarity.names, root / "similarity.png")
    return [picture, root / "similarity.json"]


def format_pairs(similarity: Similarity) -> str:
    """Lists pairs of prompts, the most similar first."""
    pairs = [
        (similarity.cosines[a, b], similarity.names[a], similarity.names[b])
        for a in range(len(similarity.names))
        for b in range(a)
    ]
    pairs.sort(key=lambda pair: -pair[0])
    return "".join(f"{cosine:7.4f}  {b}  {a}\n" for cosine, a, b in pairs)
