"""Reads the config fields of the Llama family, with the defaults of each model type."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxprompt.convert.hf_config import read_flag, read_positive, read_size, read_word
from jaxprompt.errors import InputError, brief, nearest
from jaxprompt.layers.mlp import ACTIVATIONS

LAYER_TYPES = ("full_attention", "sliding_attention")
# Defaults of transformers' config classes.
_MAX_POSITIONS = {
    "llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "gemma": 8192,
    "gemma2": 8192, "gemma3_text": 131072, "mixtral": 131072, "qwen3_moe": 32768,
    "eurobert": 8192, "gpt_oss": 131072,
}  # fmt: skip
_GLOBAL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}  # every n-th layer is global
_CAPPED = ("gemma2", "gemma3_text")  # types with soft caps
_WINDOW = 4096
_GPT_OSS_WINDOW = 128
GPT_OSS_ROPE = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=4096,
)  # fmt: skip
_QWEN_GLOBAL_LAYERS = 28  # max_window_layers


class ModelType(NamedTuple):
    """How a model type differs from Llama; integers are the defaults of its config."""

    gemma: bool = False  # norms by 1 + w, scaled embeddings, a tanh GELU by default
    sandwich: bool = False  # norms after the attention and the MLP too
    head_norms: bool = False  # norms of queries and keys
    biases: bool = True  # has the field `attention_bias`
    qkv_bias: bool = False  # always has these biases, without a field
    mlp_bias: bool = False  # has the field `mlp_bias`
    key_value_heads: int = 0  # 0 = as many as heads
    head_dim: int = 0  # 0 = width / heads
    experts: bool = False  # instead of one MLP
    mlp_width: str = "intermediate_size"  # field
    eps: float = 1e-6
    theta: float = 1e4  # of rotary positions
    attention_bias: bool = False  # default of the field
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
    "llama": ModelType(mlp_bias=True),
    "mistral": ModelType(biases=False, key_value_heads=8),
    "qwen2": ModelType(qkv_bias=True, key_value_heads=32),
    "qwen3": ModelType(head_norms=True, key_value_heads=32, head_dim=128),
    "gemma": ModelType(gemma=True, key_value_heads=16, head_dim=256),
    "gemma2": ModelType(gemma=True, sandwich=True, key_value_heads=4, head_dim=256),
    "gemma3_text": ModelType(
        gemma=True, sandwich=True, head_norms=True, key_value_heads=4, head_dim=256
    ),
    "gpt_oss": ModelType(
        attention_bias=True,
        key_value_heads=8,
        head_dim=64,
        experts=True,
        eps=1e-5,
        theta=150000.0,
        sinks=True,
    ),
    "eurobert": ModelType(mlp_bias=True, eps=1e-5, family="eurobert"),
    "mixtral": ModelType(biases=False, key_value_heads=8, experts=True, eps=1e-5, theta=1e6),
    "qwen3_moe": ModelType(
        head_norms=True, key_value_heads=4, experts=True, mlp_width="moe_intermediate_size"
    ),
}


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
    has_field = model_type.biases and not model_type.qkv_bias
    attention = has_field and read_flag(hf, "attention_bias", model_type.attention_bias)
    mlp = model_type.mlp_bias and read_flag(hf, "mlp_bias", False)
    biases = {"qkv": model_type.qkv_bias or attention, "out": attention, "mlp": mlp}
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
    return read_size(hf, "max_position_embeddings", _MAX_POSITIONS[read_type(hf)[0]])


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


def read_windows(hf: Mapping[str, Any], name: str, layers: int) -> tuple[tuple[bool, ...], int]:
    """Returns whether each layer is local, and the window in tokens."""
    full, sliding = LAYER_TYPES
    is_qwen = name in ("qwen2", "qwen3")
    if name in ("llama", "gemma", "eurobert"):
        return (False,) * layers, 0
    if name.startswith("qwen") and not read_flag(hf, "use_sliding_window", False):
        return (False,) * layers, 0
    is_null = "sliding_window" in hf and hf["sliding_window"] is None
    # Mixtral has no default.
    is_null |= name == "mixtral" and "sliding_window" not in hf
    default = _GPT_OSS_WINDOW if name == "gpt_oss" else _WINDOW
    window = 0 if is_null else read_size(hf, "sliding_window", default)
    if name in ("mistral", "mixtral", "qwen3_moe"):
        return (window > 0,) * layers, window
    if is_qwen:
        # The first `max_window_layers` have full attention, as in Qwen2Config.
        first = hf.get("max_window_layers")
        first = _QWEN_GLOBAL_LAYERS if first is None else first
        types = [sliding if window and i >= first else full for i in range(layers)]
    else:
        every = _GLOBAL_EVERY[name]
        if name == "gemma3_text":
            every = read_size(hf, "sliding_window_pattern", every)
        types = [sliding if (i + 1) % every > 0 else full for i in range(layers)]
    local = tuple(layer_type == sliding for layer_type in _read_layer_types(hf, types))
    if any(local) and not window:
        raise InputError(
            f"layer_types has {sliding}, but sliding_window=null; set it to the window in tokens"
        )
    return local, window


def _read_layer_types(hf: Mapping[str, Any], default: list[str]) -> list[str]:
    types = hf.get("layer_types")
    if types is None:
        return default
    has_length = isinstance(types, list) and len(types) == len(default)
    if not has_length or any(layer_type not in LAYER_TYPES for layer_type in types):
        raise InputError(
            f"layer_types={brief(types)} must be a list of {len(default)} entries "
            f"({', '.join(LAYER_TYPES)}), one for each of num_hidden_layers"
        )
    return types
