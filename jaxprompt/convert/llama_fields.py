"""Reads the config fields of the Llama family, with the defaults of each model type."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxprompt.convert.hf_config import read_flag, read_positive, read_size, read_word
from jaxprompt.errors import InputError, brief, is_kind, nearest
from jaxprompt.layers.mlp import ACTIVATIONS

KINDS = ("full_attention", "sliding_attention")
# What a config may leave out: positions, the window, layers of which the last is global.
_POSITIONS = {
    "llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "gemma": 8192,
    "gemma2": 8192, "gemma3_text": 131072,
}  # fmt: skip
_EVERY = {"gemma2": 2, "gemma3_text": 6}
_CAPPED = ("gemma2", "gemma3_text")
_WINDOW = 4096
_GLOBAL = 28  # layers of a Qwen


class ModelType(NamedTuple):
    """How a model type differs from Llama; numbers are the defaults of its config."""

    gemma: bool = False  # norms by 1 + w, scaled embeddings, a tanh GELU by default
    sandwich: bool = False  # norms behind the attention and the MLP too
    head_norms: bool = False  # of queries and keys
    biases: bool = True  # has the field `attention_bias`
    qkv_bias: bool = False  # always, where others have the field
    mlp_bias: bool = False  # has the field
    heads_of_keys: int = 0  # 0 = as many as there are heads
    head_dim: int = 0  # 0 = width / heads


# The defaults are those of each configuration class of transformers.
MODEL_TYPES = {
    "llama": ModelType(mlp_bias=True),
    "mistral": ModelType(biases=False, heads_of_keys=8),
    "qwen2": ModelType(qkv_bias=True, heads_of_keys=32),
    "qwen3": ModelType(head_norms=True, heads_of_keys=32, head_dim=128),
    "gemma": ModelType(gemma=True, heads_of_keys=16, head_dim=256),
    "gemma2": ModelType(gemma=True, sandwich=True, heads_of_keys=4, head_dim=256),
    "gemma3_text": ModelType(
        gemma=True, sandwich=True, head_norms=True, heads_of_keys=4, head_dim=256
    ),
}


def read_type(hf: Mapping[str, Any]) -> tuple[str, ModelType]:
    """Returns the model type of a config; "llama" if it has none."""
    name = hf.get("model_type", "llama")
    if not isinstance(name, str) or name not in MODEL_TYPES:
        raise InputError(f"model_type={brief(name)} is unknown; {nearest('', MODEL_TYPES)}")
    return name, MODEL_TYPES[name]


def read_heads(hf: Mapping[str, Any]) -> tuple[int, int, int]:
    """Reads the number of heads, of key-value heads, and the head size. Raises InputError."""
    own = read_type(hf)[1]
    width, heads = read_size(hf, "hidden_size"), read_size(hf, "num_attention_heads")
    # A config that says null has as many as heads, one that says nothing those of its type.
    usual = heads if "num_key_value_heads" in hf else own.heads_of_keys or heads
    key_heads = read_size(hf, "num_key_value_heads", usual)
    size = read_size(hf, "head_dim", own.head_dim or max(width // heads, 1))
    if heads % key_heads:
        raise InputError(
            f"num_attention_heads={heads} must be divisible by num_key_value_heads={key_heads}; "
            "give the config.json of these weights"
        )
    if size % 2 or not (hf.get("head_dim") or own.head_dim or width % heads == 0):
        raise InputError(
            f"hidden_size={width} must be an even multiple of num_attention_heads={heads}; "
            "otherwise set head_dim to an even number"
        )
    return heads, key_heads, size


def read_activation(hf: Mapping[str, Any]) -> str:
    """Reads the activation of the MLPs."""
    name, own = read_type(hf)
    field = "hidden_activation" if name in _CAPPED else "hidden_act"
    word = read_word(hf, field, "gelu_pytorch_tanh" if own.gemma else "silu", ACTIVATIONS)
    # Gemma's first configs say gelu and mean its tanh form, as GemmaConfig of transformers reads.
    return "gelu_pytorch_tanh" if (name, word) == ("gemma", "gelu") else word


def read_biases(hf: Mapping[str, Any]) -> frozenset[str]:
    """Lists which linear layers have a bias: "qkv", "out", "mlp"."""
    _, own = read_type(hf)
    every = own.biases and not own.qkv_bias and read_flag(hf, "attention_bias", False)
    mlp = own.mlp_bias and read_flag(hf, "mlp_bias", False)
    told = {"qkv": own.qkv_bias or every, "out": every, "mlp": mlp}
    return frozenset(name for name, has in told.items() if has)


def read_positions(hf: Mapping[str, Any]) -> int:
    """Reads the maximum number of positions."""
    return read_size(hf, "max_position_embeddings", _POSITIONS[read_type(hf)[0]])


def read_cap(hf: Mapping[str, Any], field: str, default: float) -> float:
    """Reads a soft cap of scores or logits; null is none, and only Gemma 2 has a default."""
    name, _ = read_type(hf)
    if name not in _CAPPED:
        return 0.0
    if hf.get(field) is None:
        return default if name == "gemma2" and field not in hf else 0.0
    if name != "gemma2" and field == "attn_logit_softcapping":  # which transformers passes over
        raise InputError(f"{field}={brief(hf[field])} is not supported for {name}; use null")
    return read_positive(hf, field, default)


def read_windows(hf: Mapping[str, Any], name: str, layers: int) -> tuple[tuple[bool, ...], int]:
    """Returns whether each layer is local, and the window in tokens."""
    qwen = name in ("qwen2", "qwen3")
    if name in ("llama", "gemma"):
        return (False,) * layers, 0
    if qwen and not read_flag(hf, "use_sliding_window", False):
        if KINDS[1] in _read_kinds(hf, [KINDS[0]] * layers):
            raise InputError(
                f"use_sliding_window=false, but layer_types has {KINDS[1]}; give the config.json "
                "of these weights"
            )
        return (False,) * layers, 0
    none = "sliding_window" in hf and hf["sliding_window"] is None
    window = 0 if none else read_size(hf, "sliding_window", _WINDOW)
    if name == "mistral":
        return (window > 0,) * layers, window
    if qwen:
        first = _read_first(hf)
        # The first `max_window_layers` see everything, as in Qwen2Config.
        kinds = [KINDS[bool(window) and i >= first] for i in range(layers)]
    else:
        every = _EVERY[name]
        if name == "gemma3_text":
            every = read_size(hf, "sliding_window_pattern", every)
        # Global are the layers whose number, counted from 1, divides by `every`.
        kinds = [KINDS[(i + 1) % every > 0] for i in range(layers)]
    local = tuple(kind == KINDS[1] for kind in _read_kinds(hf, kinds))
    if any(local) and not window:
        raise InputError(
            f"layer_types has {KINDS[1]}, but sliding_window=null; set it to the window in tokens"
        )
    return local, window


def _read_kinds(hf: Mapping[str, Any], default: list[str]) -> list[str]:
    kinds = hf.get("layer_types")
    if kinds is None:
        return default
    fits = isinstance(kinds, list) and len(kinds) == len(default)
    if not fits or any(kind not in KINDS for kind in kinds):
        raise InputError(
            f"layer_types={brief(kinds)} must be a list of {len(default)} entries "
            f"({', '.join(KINDS)}), one for each of num_hidden_layers"
        )
    return kinds


def _read_first(hf: Mapping[str, Any]) -> int:
    """Reads the first local layer of a Qwen model, counted from 0."""
    first = hf.get("max_window_layers")
    first = _GLOBAL if first is None else first
    if not is_kind(first, int) or first < 0:
        raise InputError(
            f"the config has max_window_layers={brief(first)}, which must be 0 or more; give the "
            "config.json that was saved with the weights"
        )
    return first
