"""Reads the config fields of the Llama family, with the defaults of each model type."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxprompt.convert.hf_config import (
    read_flag,
    read_layer_types,
    read_positive,
    read_size,
    read_word,
)
from jaxprompt.convert.rope import RotaryParams, read_rotary
from jaxprompt.errors import InputError, brief, nearest
from jaxprompt.layers.mlp import ACTIVATIONS

LAYER_TYPES = ("full_attention", "sliding_attention")
_CAPPED = ("gemma2", "gemma3_text")  # types with soft caps
_GPT_OSS_ROPE = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=4096,
)  # fmt: skip
_QWEN_GLOBAL_LAYERS = 28  # max_window_layers


class ModelType(NamedTuple):
    """How a model type differs from Llama; numbers are the defaults of its config."""

    positions: int  # max_position_embeddings
    gemma: bool = False  # norms by 1 + w, scaled embeddings, a tanh GELU by default
    # Where the norms are: "pre" before the attention and the MLP, "post" after them, "sandwich"
    # both, "shared" one norm before both, which are computed side by side.
    norms: str = "pre"
    norm_eps: tuple[str, float] = ("rms_norm_eps", 1e-6)  # field and default
    centred: bool = False  # norms subtract the mean
    head_norms: str = ""  # norms of queries and keys: "head" = of each head, "all" = of all at once
    attention_bias: bool | None = False  # None = has no such field
    qkv_bias: bool = False  # always has these biases, without a field
    out_bias: bool = True  # `attention_bias` applies to the output too
    mlp_bias: bool = False  # has the field `mlp_bias`
    key_value_heads: int = 0  # 0 = as many as heads
    head_dim: int = 0  # 0 = width / heads
    theta: float = 1e4  # rope_theta
    rotary_part: float | None = None  # partial_rotary_factor; None = has no such field
    interleaved: bool = False  # rotates neighbouring dimensions
    window: int | None = None  # sliding_window
    global_every: int = 0  # every n-th layer is global; 0 = all layers are alike
    glm_names: bool = False  # names of norms, see convert/names/llama.py
    fused: tuple[str, ...] = ()  # "qkv", "gate_up": matrices that the file concatenates
    experts: bool = False  # instead of one MLP
    mlp_width: str = "intermediate_size"  # field
    sinks: bool = False  # in the attention
    family: str = "llama"


class ExpertsConfig(NamedTuple):
    """The experts of a layer."""

    num_experts: int
    per_token: int
    normalized: bool  # the weights of a token's experts sum to 1
    alpha: float = 0.0  # of clamped experts
    limit: float = 0.0  # 0 = not clamped


# The defaults are those of each configuration class of transformers.
MODEL_TYPES = {
    "llama": ModelType(2048, mlp_bias=True),
    "mistral": ModelType(131072, attention_bias=None, key_value_heads=8, window=4096),
    "ministral": ModelType(131072, attention_bias=None, key_value_heads=8, window=4096),
    "qwen2": ModelType(
        32768, attention_bias=None, qkv_bias=True, key_value_heads=32, window=4096
    ),
    "qwen3": ModelType(
        32768, head_norms="head", key_value_heads=32, head_dim=128, window=4096
    ),
    "gemma": ModelType(8192, gemma=True, key_value_heads=16, head_dim=256),
    "gemma2": ModelType(
        8192, gemma=True, norms="sandwich", key_value_heads=4, head_dim=256, window=4096,
        global_every=2,
    ),
    "gemma3_text": ModelType(
        131072, gemma=True, norms="sandwich", head_norms="head", key_value_heads=4, head_dim=256,
        theta=1e6, window=4096, global_every=6,
    ),
    "phi3": ModelType(
        4096, norm_eps=("rms_norm_eps", 1e-5), attention_bias=None, rotary_part=1.0,
        fused=("qkv", "gate_up"),
    ),
    "olmo2": ModelType(
        2048, norms="post", norm_eps=("rms_norm_eps", 1e-5), head_norms="all",
    ),
    "olmo3": ModelType(
        2048, norms="post", norm_eps=("rms_norm_eps", 1e-5), head_norms="all", theta=5e5,
        window=4096, global_every=4,
    ),
    "smollm3": ModelType(32768, mlp_bias=True, key_value_heads=4, theta=2e6),
    "granite": ModelType(2048, mlp_bias=True),
    "cohere2": ModelType(
        8192, norms="shared", norm_eps=("layer_norm_eps", 1e-5), centred=True, interleaved=True,
        window=4096, global_every=4,
    ),
    "glm4": ModelType(
        131072, norms="sandwich", norm_eps=("rms_norm_eps", 1.5625e-7), attention_bias=True,
        out_bias=False, key_value_heads=2, head_dim=128, rotary_part=0.5, interleaved=True,
        glm_names=True, fused=("gate_up",),
    ),
    "mixtral": ModelType(
        131072, norm_eps=("rms_norm_eps", 1e-5), attention_bias=None, key_value_heads=8,
        theta=1e6, experts=True,
    ),
    "qwen3_moe": ModelType(
        32768, head_norms="head", key_value_heads=4, window=4096, experts=True,
        mlp_width="moe_intermediate_size",
    ),
    "gpt_oss": ModelType(
        131072, norm_eps=("rms_norm_eps", 1e-5), attention_bias=True, key_value_heads=8,
        head_dim=64, theta=150000.0, window=128, global_every=2, experts=True, sinks=True,
    ),
    "eurobert": ModelType(
        8192, norm_eps=("rms_norm_eps", 1e-5), mlp_bias=True, family="eurobert"
    ),
}  # fmt: skip


def read_type(hf: Mapping[str, Any]) -> tuple[str, ModelType]:
    """Returns the model type of a config; "llama" if it has none."""
    name = str(hf.get("model_type", "llama"))
    if name not in MODEL_TYPES:
        raise InputError(f"model_type={brief(name)} is unknown; {nearest('', MODEL_TYPES)}")
    return name, MODEL_TYPES[name]


def read_heads(hf: Mapping[str, Any]) -> tuple[int, int, int]:
    """Reads the number of heads, of key-value heads, and the head size. Raises InputError."""
    model_type = read_type(hf)[1]
    width, heads = read_size(hf, "hidden_size"), read_size(hf, "num_attention_heads")
    # null means as many as heads, a missing field the default of the type.
    default = heads if "num_key_value_heads" in hf else model_type.key_value_heads or heads
    key_heads = read_size(hf, "num_key_value_heads", default)
    size = read_size(hf, "head_dim", model_type.head_dim or max(width // heads, 1))
    if heads % key_heads:
        raise InputError(
            f"num_attention_heads={heads} must be divisible by num_key_value_heads={key_heads}; "
            "give the config.json of these weights"
        )
    if size % 2 or not (hf.get("head_dim") or model_type.head_dim or width % heads == 0):
        raise InputError(
            f"hidden_size={width} must be an even multiple of num_attention_heads={heads}; "
            "otherwise set head_dim to an even number"
        )
    return heads, key_heads, size


def read_activation(hf: Mapping[str, Any]) -> str:
    """Reads the activation of the MLPs."""
    name, model_type = read_type(hf)
    field = "hidden_activation" if name in _CAPPED else "hidden_act"
    default = "gelu_pytorch_tanh" if model_type.gemma else "silu"
    # transformers ignores the field of gpt_oss, whose experts have one function.
    choices = ("silu",) if name == "gpt_oss" else ACTIVATIONS
    activation = read_word(hf, field, default, choices)
    # Gemma's first configs write gelu for its tanh form, as GemmaConfig of transformers reads it.
    return "gelu_pytorch_tanh" if (name, activation) == ("gemma", "gelu") else activation


def read_biases(hf: Mapping[str, Any]) -> frozenset[str]:
    """Lists which linear layers have a bias: "qkv", "out", "mlp"."""
    _, model_type = read_type(hf)
    default = model_type.attention_bias
    attention = default is not None and read_flag(hf, "attention_bias", default)
    mlp = model_type.mlp_bias and read_flag(hf, "mlp_bias", False)
    out = attention and model_type.out_bias
    biases = {"qkv": model_type.qkv_bias or attention, "out": out, "mlp": mlp}
    return frozenset(name for name, has_bias in biases.items() if has_bias)


def read_experts(hf: Mapping[str, Any]) -> ExpertsConfig | None:
    """Reads the experts of every layer; None for models without.

    Raises:
      InputError: if some layers have an MLP instead, or the router gets noise.
    """
    name, model_type = read_type(hf)
    if not model_type.experts:
        return None
    refused = {"mlp_only_layers": [], "decoder_sparse_step": 1, "router_jitter_noise": 0.0}
    for field, supported in refused.items():
        if hf.get(field) not in (None, supported):
            raise InputError(
                f"{field}={brief(hf[field])} is not supported; use a model with {supported}"
            )
    # The second name is that of transformers 5 for all types.
    field = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
    num_experts, per_token = read_size(hf, field), read_size(hf, "num_experts_per_tok")
    if per_token > num_experts:
        raise InputError(
            f"num_experts_per_tok={per_token} must not exceed {field}={num_experts}; give the "
            "config.json of these weights"
        )
    if name == "gpt_oss":
        # The softmax of the chosen scores is that of all, normalised.
        clamp = read_positive(hf, "swiglu_alpha", 1.702), read_positive(hf, "swiglu_limit", 7.0)
        return ExpertsConfig(num_experts, per_token, True, *clamp)
    normalized = name == "mixtral" or read_flag(hf, "norm_topk_prob", False)
    return ExpertsConfig(num_experts, per_token, normalized)


def read_positions(hf: Mapping[str, Any]) -> int:
    """Reads the maximum number of positions."""
    return read_size(hf, "max_position_embeddings", read_type(hf)[1].positions)


def read_cap(hf: Mapping[str, Any], field: str, default: float) -> float:
    """Reads a soft cap of scores or logits; null means none, and only Gemma 2 has a default."""
    name, _ = read_type(hf)
    if name not in _CAPPED:
        return 0.0
    if hf.get(field) is None:
        return default if name == "gemma2" and field not in hf else 0.0
    if name != "gemma2" and field == "attn_logit_softcapping":  # ignored by transformers
        raise InputError(f"{field}={brief(hf[field])} is not supported for {name}; use null")
    return read_positive(hf, field, default)


def read_windows(hf: Mapping[str, Any], layers: int) -> tuple[tuple[bool, ...], int]:
    """Returns whether each layer is local, and the window in tokens."""
    full, sliding = LAYER_TYPES
    name, model_type = read_type(hf)
    is_global = (False,) * layers, 0
    has_flag = name in ("qwen2", "qwen3", "qwen3_moe", "smollm3")
    uses_windows = not has_flag or read_flag(hf, "use_sliding_window", False)
    if model_type.window is None and name not in ("phi3", "smollm3", "mixtral"):
        return is_global
    if name.startswith("qwen") and not uses_windows:
        return is_global
    is_null = hf.get("sliding_window", model_type.window) is None
    window = 0 if is_null else read_size(hf, "sliding_window", model_type.window)
    if name in ("mistral", "mixtral", "qwen3_moe", "phi3"):
        return (window > 0,) * layers, window
    local = tuple(layer_type == sliding for layer_type in _read_layer_types(hf, layers, window))
    if any(local) and not uses_windows:
        raise InputError(
            f"use_sliding_window=false, but layer_types has {sliding}; set one of them as the "
            "model was trained"
        )
    if any(local) and not window:
        raise InputError(
            f"layer_types has {sliding}, but sliding_window=null; set it to the window in tokens"
        )
    return local, window


def _read_layer_types(hf: Mapping[str, Any], layers: int, window: int) -> list[str]:
    """Reads the type of each layer, by default as transformers' config class derives it."""
    full, sliding = LAYER_TYPES
    name, model_type = read_type(hf)
    if (types := read_layer_types(hf, layers, LAYER_TYPES)) is not None:
        return types
    if name.startswith("qwen"):
        # The first `max_window_layers` have full attention, as in Qwen2Config.
        first = hf.get("max_window_layers")
        first = _QWEN_GLOBAL_LAYERS if first is None else first
        local = [bool(window) and i >= first for i in range(layers)]
    elif name == "smollm3":
        uses_windows = bool(window) and read_flag(hf, "use_sliding_window", False)
        local = [uses_windows and not rotates for rotates in read_rotated(hf, layers)]
    elif every := model_type.global_every:
        if name in ("gemma3_text", "cohere2"):
            every = read_size(hf, "sliding_window_pattern", every)
        local = [(i + 1) % every > 0 for i in range(layers)]
    else:
        local = [bool(window)] * layers
    return [sliding if is_local else full for is_local in local]


def read_rotated(hf: Mapping[str, Any], layers: int) -> list[bool]:
    """Reads whether each layer of a SmolLM3 rotates queries and keys."""
    flags = hf.get("no_rope_layers")  # 1 = rotates
    if flags is None:
        every = read_size(hf, "no_rope_layer_interval", 4)
        return [(i + 1) % every > 0 for i in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers or any(x not in (0, 1) for x in flags):
        raise InputError(
            f"no_rope_layers={brief(flags)} must be a list of 0 (without rotary positions) and 1, "
            f"one for each of num_hidden_layers={layers}"
        )
    return [bool(flag) for flag in flags[:layers]]


class Rotations(NamedTuple):
    """The rotary embeddings of a model, and which of them each layer uses."""

    params: tuple[RotaryParams, ...]  # at most two
    of_layer: tuple[int, ...]


def read_rotations(
    hf: Mapping[str, Any], size: int, positions: int, is_local: tuple[bool, ...]
) -> Rotations:
    """Reads the rotary embeddings of each layer; those that rotate by 0 leave a layer without."""
    name, model_type = read_type(hf)
    if name == "gpt_oss" and not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        hf = {**hf, "rope_parameters": _GPT_OSS_ROPE}
    # Those of local layers have no field for their base without a block of their own.
    if name in ("gemma3_text", "olmo3"):
        thetas = model_type.theta, 1e4 if name == "gemma3_text" else model_type.theta
        pairs = zip(LAYER_TYPES, thetas, strict=True)
        params = tuple(
            read_rotary(hf, size, positions, kind=kind, theta=theta) for kind, theta in pairs
        )
        return Rotations(params, tuple(map(int, is_local)))
    rotary = read_rotary(hf, size, positions, theta=model_type.theta, part=model_type.rotary_part)
    if name == "smollm3":
        is_unrotated = [not rotates for rotates in read_rotated(hf, len(is_local))]
    elif name == "cohere2":
        is_unrotated = [not local for local in is_local]
    else:
        is_unrotated = [False] * len(is_local)
    if not any(is_unrotated):
        return Rotations((rotary,), (0,) * len(is_local))
    still = RotaryParams((0.0,) * len(rotary.frequencies))
    return Rotations((rotary, still), tuple(map(int, is_unrotated)))
