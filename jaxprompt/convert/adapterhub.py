"""Prefixes in the adapter folders of the library `adapters` (AdapterHub).

A folder contains adapter_config.json and pytorch_adapter.bin or adapter.safetensors. A prefix is
one vector [P*2*L*N*D] in the order of PEFT, or an MLP with tanh computes it from embeddings [P, H].
It is named after its attention: self_prefix (`self` in a DistilBERT), and in an encoder-decoder
encoder_prefix and cross_prefix. The number of layers and heads is that of the model.

Unlike PEFT, the library does not shift the positions of the text.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxprompt.convert.peft import finite_float32
from jaxprompt.convert.weights import read_tensors
from jaxprompt.errors import InputError, brief, first_line
from jaxprompt.files import read_json

_CONFIG = "adapter_config.json"
_PARTS = ("weight", "bias")
_TENSORS = ("pytorch_adapter.bin", "adapter.safetensors")
_HEAD_CONFIG = "head_config.json"
_HEAD_TENSORS = ("pytorch_model_head.bin", "model_head.safetensors")
FILES = (_CONFIG, *_TENSORS, _HEAD_CONFIG, *_HEAD_TENSORS)
# Each layer's attention lists the same tensors again, below `pool`.
_PREFIX_NAME = re.compile(r"(?:\w+\.)?prefix_tuning\.prefix_tunings\.[^.]+\.(\w+\..+)")
_HEAD_NAME = re.compile(r"heads\.[^.]+\.(\d+\.\w+)")
# A head for classes by (layers, use_pooler): its pooler as in `heads/linear.py`, and the names that
# its linear layers have there, by their number among all layers.
_CLASSIFIERS: Mapping[tuple[object, object], tuple[str, dict[str, str]]] = {
    (2, False): ("trained", {"1": "pooler", "4": "out"}),
    (1, False): ("cls", {"1": "out"}),
    (1, True): ("checkpoint", {"1": "out"}),
}


def read_prefixes(folder: Path) -> dict[str, np.ndarray]:
    """Reads the prefixes of an adapter, by attention, each float32 [P, 2*L*N*D].

    Raises:
      InputError: if the adapter is not only a prefix in every layer, or its files are broken.
    """
    config = _read_config(folder / _CONFIG)
    if config.get("architecture") != "prefix_tuning":
        raise InputError(
            f"{folder / _CONFIG} has architecture={brief(config.get('architecture'))} and no "
            "peft_type; use prefix_tuning of adapters, or an adapter of PEFT"
        )
    for field in ("leave_out", "use_gating"):
        if config.get(field):
            raise InputError(
                f"{folder / _CONFIG} has {field}={brief(config[field])}, which is not supported; "
                f"train the prefix without {field}"
            )
    path, tensors = _read_file(folder, _TENSORS, _PREFIX_NAME)
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        attention, _, part = name.partition(".")
        parts.setdefault(attention.removesuffix("_prefix") + "_prefix", {})[part] = tensor
    try:
        prefixes = {name: _prefix(path, tensors, config) for name, tensors in parts.items()}
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(
            f"{path} has other tensors than {_CONFIG} describes ({first_line(error)}); save the "
            "adapter again"
        ) from error
    if not prefixes:
        raise InputError(f"{path} contains no prefix; save the adapter again")
    return prefixes


def read_classifier(folder: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Reads the head for classes that was saved with an adapter, if it has a form of ours.

    Returns:
      (its pooler, torch's tensors "pooler.weight", "out.bias" etc.), ("", {}) without such a head.
    """
    if not (folder / _HEAD_CONFIG).exists():
        return "", {}
    config = _read_config(folder / _HEAD_CONFIG)
    form = config.get("layers"), config.get("use_pooler")
    kind = config.get("head_type"), config.get("activation_function")
    # A list, because a value of the file may not be hashable.
    if kind != ("classification", "tanh") or form not in list(_CLASSIFIERS):
        return "", {}
    path, tensors = _read_file(folder, _HEAD_TENSORS, _HEAD_NAME)
    pooler, linear = _CLASSIFIERS[form]
    names = {f"{i}.{part}": f"{name}.{part}" for i, name in linear.items() for part in _PARTS}
    if set(tensors) != set(names):
        raise InputError(
            f"{path} has other tensors than {_HEAD_CONFIG} describes; save the head again, or "
            "remove it"
        )
    return pooler, {names[name]: tensor for name, tensor in tensors.items()}


def _prefix(path: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    """Returns a prefix as stored, or computes it by its MLP. [P, 2*L*N*D]"""
    if "control_trans" in tensors:
        return tensors["control_trans"].reshape(config["prefix_length"], -1)
    if config["non_linearity"] != "tanh":
        raise InputError(
            f"{path} has an MLP with non_linearity={brief(config['non_linearity'])}, which is not "
            "supported; use tanh, or flat=True"
        )
    names = ("control_trans.0", "control_trans.2")
    (first, first_bias), (last, last_bias) = (
        [tensors[f"{name}.{part}"] for part in _PARTS] for name in names
    )
    return np.tanh(tensors["wte.weight"] @ first.T + first_bias) @ last.T + last_bias


def _read_config(path: Path) -> Mapping[str, Any]:
    """Reads the block `config` of a file, {} if it has none."""
    config = read_json(path, "a folder of adapters").get("config")
    return config if isinstance(config, Mapping) else {}


def _read_file(
    folder: Path, files: Sequence[str], pattern: re.Pattern[str]
) -> tuple[Path, dict[str, np.ndarray]]:
    """Reads the tensors of the first file that exists, by the part of their name in `pattern`."""
    path = next((folder / name for name in files if (folder / name).exists()), folder / files[0])
    tensors = read_tensors(path, lambda name: pattern.fullmatch(name) is not None)
    names = {name: match[1] for name in tensors if (match := pattern.fullmatch(name))}
    return path, finite_float32(path, {names[name]: tensor for name, tensor in tensors.items()})
