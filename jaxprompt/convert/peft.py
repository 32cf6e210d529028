"""Prompts in PEFT's adapter folders, read and written without torch.

A folder contains adapter_config.json and adapter_model.safetensors. Soft prompts (PROMPT_TUNING,
P_TUNING and CPT as saved) are `prompt_embeddings` [P, E], prefixes (PREFIX_TUNING, CARTRIDGE)
[P, 2*L*N*D]; both are float32. A head's tensors keep torch's names and [out, in] layout.

MULTITASK_PROMPT_TUNING (Wang et al. 2023) multiplies the soft prompt by the product of
`prefix_task_cols` [tasks, P, R] and `prefix_task_rows` [tasks, R, E] of a task.

On an encoder-decoder (num_transformer_submodules 2) PEFT saves soft prompts of [2*P, E]. It uses
only the first half, but with MULTITASK_PROMPT_TUNING the second half is put before the decoder's
input. Its prefix is only in the decoder's self-attention, where layers share vectors.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.errors import InputError, brief, is_kind
from jaxprompt.files import make_folder, open_regular, read_json, user_path, write_atomic

_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
FILES = (_CONFIG, _TENSORS)
_MULTITASK = "MULTITASK_PROMPT_TUNING"
_METHODS = {
    **dict.fromkeys(("PROMPT_TUNING", "P_TUNING", "CPT", _MULTITASK), "soft"),
    **dict.fromkeys(("PREFIX_TUNING", "CARTRIDGE"), "prefix"),
}
TYPES = tuple(_METHODS)
# The task types that PEFT runs a type on, if not all.
_TASK_TYPES = {"CPT": ("CAUSAL_LM",), _MULTITASK: ("CAUSAL_LM", "SEQ_2_SEQ_LM")}
_HEAD_PREFIX = "base_model."


class Adapter(NamedTuple):
    """A prompt in PEFT's form, float32: by `method`, either `soft` or `k` and `v` are set."""

    method: str  # "soft" or "prefix"
    soft: np.ndarray | None  # [P, E]
    k: np.ndarray | None  # [L, P, N, D]
    v: np.ndarray | None  # [L, P, N, D]
    head: dict[str, np.ndarray]  # torch names, e.g. "classifier.weight" [C, H]
    config: dict[str, Any]  # adapter_config.json
    stream: str = "encoder"  # "decoder" for the prefix of an encoder-decoder
    decoder_soft: np.ndarray | None = None  # [P, E], before the decoder's input


def prefix_from_peft(
    flat: np.ndarray, layers: int, heads: int, head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Splits PEFT's prefix into keys and values. [P, 2*L*N*D] -> [L, P, N, D] x 2"""
    width = 2 * layers * heads * head_dim
    if flat.ndim != 2 or flat.shape[1] != width:
        raise InputError(
            f"the prefix has shape {list(flat.shape)}; {layers} layers of {heads} heads of size "
            f"{head_dim} need [length, {width}]: use the backbone of the adapter"
        )
    pairs = flat.reshape(-1, layers, 2, heads, head_dim)  # [P, L, 2, N, D]
    k, v = pairs.transpose(2, 1, 0, 3, 4)  # [P, L, 2, N, D] -> [2, L, P, N, D]
    return k, v


def tie_layers(k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys and values that PEFT uses in the decoder of an encoder-decoder.

    PEFT doubles the list k_0, v_0, k_1, ... and assigns four items to a layer, which uses two of
    them: an even number of layers shares keys and values in pairs, and half of them are unused.
    [L, P, N, D] x 2 -> [L, P, N, D] x 2
    """
    layers = k.shape[0]
    states = np.stack([k, v], axis=1).reshape(2 * layers, *k.shape[1:])  # k_0, v_0, k_1, ...
    # Modulo, because the list is doubled.
    first = 4 * np.arange(layers) % (2 * layers)
    return states[first], states[first + 1]


def prefix_to_peft(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Inverts `prefix_from_peft`. [L, P, N, D] x 2 -> [P, 2*L*N*D]"""
    pairs = np.stack([k, v]).transpose(2, 1, 0, 3, 4)  # [2, L, P, N, D] -> [P, L, 2, N, D]
    return np.ascontiguousarray(pairs.reshape(pairs.shape[0], -1))


def read_peft(folder: str | Path, task_id: int | None = None) -> Adapter:
    """Reads an adapter with a soft prompt or a prefix, and its head.

    Args:
      folder: where it is.
      task_id: the task of a MULTITASK_PROMPT_TUNING adapter, required if it has several.

    Raises:
      InputError: if the adapter is of another type or its files are broken.
    """
    folder = user_path(folder)
    config = read_json(folder / _CONFIG, "a PEFT adapter folder")
    peft_type = str(config.get("peft_type"))
    if peft_type not in _METHODS:
        raise InputError(
            f"{folder / _CONFIG}: peft_type {brief(peft_type)} is not supported; "
            f"use one of {', '.join(TYPES)}"
        )
    modules = 2 if config.get("num_transformer_submodules") == 2 else 1
    tensors = _read_tensors(folder / _TENSORS)
    table = tensors.pop("prompt_embeddings", None)
    if table is None or table.ndim != 2:
        raise InputError(
            f"{folder / _TENSORS} lacks the matrix 'prompt_embeddings'; save the adapter again"
        )
    decoder_soft = None
    if peft_type == _MULTITASK:
        table = _task_prompt(folder / _TENSORS, table, tensors, task_id)
        decoder_soft = table[len(table) // 2 :] if modules == 2 else None
    else:
        check_no_task(folder, task_id)
    head = {name.removeprefix(_HEAD_PREFIX): tensor for name, tensor in tensors.items()}
    if _METHODS[peft_type] == "soft":
        soft = table[: len(table) // modules]
        return Adapter("soft", soft, None, None, head, config, decoder_soft=decoder_soft)
    values = [config.get(field) for field in ("num_layers", "num_attention_heads", "token_dim")]
    sizes = [int(value) for value in values if value and is_kind(value, int)]
    if len(sizes) < len(values) or min(sizes) < 1:
        raise InputError(
            f"{folder / _CONFIG} lacks num_layers, num_attention_heads or token_dim; save the "
            "adapter again"
        )
    layers, heads, width = sizes
    k, v = prefix_from_peft(table, layers, heads, width // heads)
    if modules == 1:
        return Adapter("prefix", None, k, v, head, config)
    return Adapter("prefix", None, *tie_layers(k, v), head, config, "decoder")


def check_no_task(path: str | Path, task_id: int | None) -> None:
    """Raises InputError if a task is chosen of a prompt that is not multi-task."""
    if task_id is not None:
        raise InputError(
            f"{path} is not a {_MULTITASK} adapter, so it has no task_id={task_id}; remove task_id"
        )


def types_for(method: str, task_type: str) -> list[str]:
    """Lists the values of peft_type that store "soft" or "prefix" for a task type."""
    return [
        name
        for name, stored in _METHODS.items()
        if stored == method and task_type in _TASK_TYPES.get(name, (task_type,))
    ]


def write_peft(
    folder: str | Path,
    *,
    base: str,
    revision: str = "",
    layers: int,
    heads: int,
    soft: np.ndarray | None = None,
    prefix: tuple[np.ndarray, np.ndarray] | None = None,
    head: Mapping[str, np.ndarray] | None = None,
    task_type: str | None = None,
    peft_type: str | None = None,
) -> tuple[Path, Path]:
    """Writes an adapter that PeftModel.from_pretrained loads: a soft prompt or a prefix.

    Args:
      folder: where to write.
      base: the name of the base model.
      revision: its revision on the Hub.
      layers: the number of layers of the base model.
      heads: its number of attention heads.
      soft: a soft prompt, [P, E].
      prefix: keys and values, each [L, P, N, D].
      head: torch names to tensors, which PEFT requires for the classification tasks, e.g.
        {"classifier.weight": [C, H], "classifier.bias": [C]}.
      task_type: PEFT's task type; by default SEQ_CLS with a head and FEATURE_EXTRACTION without.
        Use CAUSAL_LM for GPT-2 and SEQ_2_SEQ_LM for T5, for which PEFT cannot store our prefixes.
      peft_type: one of `types_for`, by default PROMPT_TUNING or PREFIX_TUNING.

    Returns:
      The paths of the two files.
    """
    table = prefix_to_peft(*prefix) if prefix is not None else np.asarray(soft)
    head = dict(head or {})
    task_type = task_type or ("SEQ_CLS" if head else "FEATURE_EXTRACTION")
    config = {
        "base_model_name_or_path": base,
        "inference_mode": True,
        "num_attention_heads": heads,
        "num_layers": layers,
        "num_transformer_submodules": 1,
        "num_virtual_tokens": table.shape[0],
        "peft_type": peft_type or ("PROMPT_TUNING" if prefix is None else "PREFIX_TUNING"),
        "revision": revision or None,
        "task_type": task_type,
        "token_dim": table.shape[1] // (1 if prefix is None else 2 * layers),
    }
    tensors = {"prompt_embeddings": table}
    if peft_type == "CPT":
        config["cpt_token_ids"] = [0] * len(table)  # PEFT only counts them
    elif peft_type == _MULTITASK:  # one task, which multiplies by 1
        config |= {"num_tasks": 1, "num_ranks": 1}
        tensors["prefix_task_cols"] = np.ones((1, len(table), 1))
        tensors["prefix_task_rows"] = np.ones((1, 1, table.shape[1]))
    tensors |= {_HEAD_PREFIX + name: tensor for name, tensor in head.items()}
    tensors = {name: np.ascontiguousarray(t, np.float32) for name, t in tensors.items()}
    from safetensors.numpy import save

    folder = make_folder(folder)
    write_atomic(folder / _TENSORS, save(tensors, metadata={"format": "pt"}))
    # The config last: without it the folder is no adapter yet.
    write_atomic(folder / _CONFIG, json.dumps(config, indent=2) + "\n")
    return folder / _TENSORS, folder / _CONFIG


def num_outputs(adapter: Mapping[str, Any]) -> int:
    """Returns the number of outputs of the head in the arguments of `write_peft`, 0 if no head."""
    head = adapter.get("head") or {}
    return next((len(x) for name, x in sorted(head.items()) if name.endswith("bias")), 0)


def _task_prompt(
    path: Path, table: np.ndarray, tensors: dict[str, np.ndarray], task_id: int | None
) -> np.ndarray:
    """Returns the soft prompt of a task, and removes its factors from `tensors`. [P, E]"""
    names = ("prefix_task_cols", "prefix_task_rows")
    cols, rows = (np.atleast_1d(tensors.pop(name, np.zeros((0, 0, 0)))) for name in names)
    tasks, rank = len(cols), cols.shape[-1]
    if (cols.shape, rows.shape) != ((tasks, len(table), rank), (tasks, rank, table.shape[1])):
        raise InputError(
            f"{path} has prefix_task_cols {list(cols.shape)} and prefix_task_rows "
            f"{list(rows.shape)} for prompt_embeddings {list(table.shape)}; save the adapter again"
        )
    if task_id is None and tasks > 1:
        raise InputError(
            f"{path} has {tasks} tasks; choose one with jp.load_prompt(folder, task_id=0), which "
            "jp.save_prompt can write to an .npy file"
        )
    task_id = task_id or 0
    if not 0 <= task_id < tasks:
        raise InputError(f"{path} has no task_id={task_id}; use 0 to {tasks - 1}")
    return table * (cols[task_id] @ rows[task_id])


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    import ml_dtypes  # noqa: F401 - gives numpy the name bfloat16
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        open_regular(path).close()
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is missing or damaged ({error}); save the adapter with "
            "safe_serialization=True, or download it again"
        ) from error
    return finite_float32(path, tensors)


def finite_float32(path: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors of a file as float32. Raises InputError for NaN or infinity."""
    # Before the check, because values beyond float32's range become infinite.
    with np.errstate(over="ignore"):
        values = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    for name, tensor in values.items():
        if not np.isfinite(tensor).all():
            raise InputError(f"{path}: {name} contains NaN or infinity; train it again")
    return values
