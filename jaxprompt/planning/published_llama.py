"""The shapes of published checkpoints of the Llama family, from their config.json."""

from typing import Any

_LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
_ROPE31, _ROPE32 = ({"rope_parameters": _LLAMA3 | {"factor": factor}} for factor in (8.0, 32.0))
_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


def _base(
    model_type: str, vocab: int, positions: int, theta: float, **fields: Any
) -> dict[str, Any]:
    return (
        dict(
            model_type=model_type,
            vocab_size=vocab,
            max_position_embeddings=positions,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )
        | fields
    )


_LLAMA2 = _base("llama", 32000, 4096, 1e4, rms_norm_eps=1e-5) | _UNTIED
_LLAMA31 = _base("llama", 128256, 131072, 5e5, rms_norm_eps=1e-5)
_SMOL = _base("llama", 49152, 8192, 1e5, rms_norm_eps=1e-5) | _TIED
_MISTRAL = _base("mistral", 32000, 32768, 1e4, rms_norm_eps=1e-5) | _UNTIED
_QWEN25 = _base("qwen2", 151936, 32768, 1e6)
_QWEN3 = _base("qwen3", 151936, 40960, 1e6, head_dim=128)
_MIXTRAL = _base(
    "mixtral", 32000, 32768, 1e6, rms_norm_eps=1e-5, num_local_experts=8, num_experts_per_tok=2,
    sliding_window=None,
)  # fmt: skip
_QWEN3_MOE = _QWEN3 | dict(
    model_type="qwen3_moe", num_experts=128, num_experts_per_tok=8, norm_topk_prob=True
)
_GPT_OSS = dict(
    model_type="gpt_oss", vocab_size=201088, num_experts_per_tok=4, head_dim=64, sliding_window=128,
    max_position_embeddings=131072,
)  # fmt: skip
_GEMMA = _base("gemma", 256000, 8192, 1e4, head_dim=256)
_GEMMA2 = _base("gemma2", 256000, 8192, 1e4, head_dim=256, query_pre_attn_scalar=256)
_GEMMA3 = _base(
    "gemma3_text", 262144, 32768, 1e6, head_dim=256, query_pre_attn_scalar=256, sliding_window=512
)
_GEMMA3["rope_parameters"] = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_PHI = _base("phi3", 32064, 4096, 1e4, rms_norm_eps=1e-5, sliding_window=2047) | _UNTIED
# The factors shape no parameter: all are 1 here.
_PHI4_MINI = _base("phi3", 200064, 131072, 1e4, rms_norm_eps=1e-5, sliding_window=262144) | _TIED
_PHI4_MINI |= dict(original_max_position_embeddings=4096, partial_rotary_factor=0.75)
_PHI4_MINI["rope_parameters"] = dict(
    rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75, short_factor=[1.0] * 48,
    long_factor=[1.0] * 48,
)  # fmt: skip
_OLMO2 = _base("olmo2", 100352, 4096, 5e5, rms_norm_eps=1e-6) | _UNTIED
_OLMO3 = _base("olmo3", 100278, 65536, 5e5, rms_norm_eps=1e-6, sliding_window=4096) | _UNTIED
_OLMO3["rope_parameters"] = {
    "full_attention": dict(
        rope_type="yarn", rope_theta=5e5, factor=8.0, original_max_position_embeddings=8192
    ),
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
_GRANITE = _base("granite", 49159, 131072, 1e7, rms_norm_eps=1e-5) | _TIED
_GRANITE |= dict(embedding_multiplier=12.0, residual_multiplier=0.22)
# Hub id: what its model type and vocabulary say; width, layers, heads, heads of keys, MLP.
_CHECKPOINTS: dict[str, tuple[dict[str, Any], tuple[int, int, int, int, int]]] = {
    "HuggingFaceTB/SmolLM2-135M": (_SMOL, (576, 30, 9, 3, 1536)),
    "HuggingFaceTB/SmolLM2-360M": (_SMOL, (960, 32, 15, 5, 2560)),
    "HuggingFaceTB/SmolLM2-1.7B": (
        _base("llama", 49152, 8192, 130000.0, rms_norm_eps=1e-5) | _TIED, (2048, 24, 32, 32, 8192),
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (
        _LLAMA2 | {"max_position_embeddings": 2048}, (2048, 22, 32, 4, 5632),
    ),
    "meta-llama/Llama-2-7b-hf": (_LLAMA2, (4096, 32, 32, 32, 11008)),
    "meta-llama/Llama-2-13b-hf": (_LLAMA2, (5120, 40, 40, 40, 13824)),
    "meta-llama/Llama-2-70b-hf": (_LLAMA2, (8192, 80, 64, 8, 28672)),
    "meta-llama/Llama-3.1-8B": (_LLAMA31 | _ROPE31 | _UNTIED, (4096, 32, 32, 8, 14336)),
    "meta-llama/Llama-3.1-70B": (_LLAMA31 | _ROPE31 | _UNTIED, (8192, 80, 64, 8, 28672)),
    "meta-llama/Llama-3.2-1B": (
        _LLAMA31 | _ROPE32 | _TIED | {"head_dim": 64}, (2048, 16, 32, 8, 8192),
    ),
    "meta-llama/Llama-3.2-3B": (
        _LLAMA31 | _ROPE32 | _TIED | {"head_dim": 128}, (3072, 28, 24, 8, 8192),
    ),
    "mistralai/Mistral-7B-v0.1": (
        _MISTRAL | {"sliding_window": 4096}, (4096, 32, 32, 8, 14336),
    ),
    "mistralai/Mistral-7B-v0.3": (
        _base("mistral", 32768, 32768, 1e6, rms_norm_eps=1e-5, sliding_window=None) | _UNTIED,
        (4096, 32, 32, 8, 14336),
    ),
    "Qwen/Qwen2.5-0.5B": (_QWEN25 | _TIED, (896, 24, 14, 2, 4864)),
    "Qwen/Qwen2.5-1.5B": (_QWEN25 | _TIED, (1536, 28, 12, 2, 8960)),
    "Qwen/Qwen2.5-7B": (
        _QWEN25 | _UNTIED | {"vocab_size": 152064, "max_position_embeddings": 131072},
        (3584, 28, 28, 4, 18944),
    ),
    "Qwen/Qwen3-0.6B": (_QWEN3 | _TIED, (1024, 28, 16, 8, 3072)),
    "Qwen/Qwen3-8B": (_QWEN3 | _UNTIED, (4096, 36, 32, 8, 12288)),
    "mistralai/Mixtral-8x7B-v0.1": (_MIXTRAL | _UNTIED, (4096, 32, 32, 8, 14336)),
    "mistralai/Mixtral-8x22B-v0.1": (
        _MIXTRAL | _UNTIED | {"max_position_embeddings": 65536},
        (6144, 56, 48, 8, 16384),
    ),
    "Qwen/Qwen3-30B-A3B": (
        _QWEN3_MOE | _UNTIED | {"moe_intermediate_size": 768}, (2048, 48, 32, 4, 6144),
    ),
    "Qwen/Qwen3-235B-A22B": (
        _QWEN3_MOE | _UNTIED | {"moe_intermediate_size": 1536}, (4096, 94, 64, 4, 12288),
    ),
    "openai/gpt-oss-20b": (
        _GPT_OSS | _UNTIED | {"num_local_experts": 32}, (2880, 24, 64, 8, 2880),
    ),
    "openai/gpt-oss-120b": (
        _GPT_OSS | _UNTIED | {"num_local_experts": 128}, (2880, 36, 64, 8, 2880),
    ),
    "google/gemma-2b": (_GEMMA, (2048, 18, 8, 1, 16384)),
    "google/gemma-7b": (_GEMMA, (3072, 28, 16, 16, 24576)),
    "google/gemma-2-2b": (_GEMMA2, (2304, 26, 8, 4, 9216)),
    "google/gemma-2-9b": (_GEMMA2, (3584, 42, 16, 8, 14336)),
    "google/gemma-3-270m": (_GEMMA3, (640, 18, 4, 1, 2048)),
    "google/gemma-3-1b-pt": (_GEMMA3, (1152, 26, 4, 1, 6912)),
    "mistralai/Ministral-8B-Instruct-2410": (
        _base("mistral", 131072, 32768, 1e8, rms_norm_eps=1e-5, head_dim=128, sliding_window=32768)
        | _UNTIED,
        (4096, 36, 32, 8, 12288),
    ),
    "microsoft/Phi-3-mini-4k-instruct": (_PHI, (3072, 32, 32, 32, 8192)),
    "microsoft/Phi-4-mini-instruct": (_PHI4_MINI, (3072, 32, 24, 8, 8192)),
    "microsoft/phi-4": (
        _base("phi3", 100352, 16384, 250000.0, rms_norm_eps=1e-5) | _UNTIED,
        (5120, 40, 40, 10, 17920),
    ),
    "allenai/OLMo-2-0425-1B": (_OLMO2, (2048, 16, 16, 16, 8192)),
    "allenai/OLMo-2-1124-7B": (_OLMO2, (4096, 32, 32, 32, 11008)),
    "allenai/OLMo-2-1124-13B": (_OLMO2, (5120, 40, 40, 40, 13824)),
    "allenai/Olmo-3-1025-7B": (_OLMO3, (4096, 32, 32, 32, 11008)),
    "HuggingFaceTB/SmolLM3-3B": (
        _base("smollm3", 128256, 65536, 5e6) | _TIED, (2048, 36, 16, 4, 11008),
    ),
    "ibm-granite/granite-3.3-2b-instruct": (
        _GRANITE | dict(attention_multiplier=0.015625, logits_scaling=8.0),
        (2048, 40, 32, 8, 8192),
    ),
    "ibm-granite/granite-3.3-8b-instruct": (
        _GRANITE | dict(attention_multiplier=0.0078125, logits_scaling=16.0),
        (4096, 40, 32, 8, 12800),
    ),
    "CohereLabs/c4ai-command-r7b-12-2024": (
        _base("cohere2", 256000, 132096, 5e4, logit_scale=0.25) | _TIED, (4096, 32, 32, 8, 14336),
    ),
    "zai-org/GLM-4-9B-0414": (
        _base("glm4", 151552, 32768, 1e4, rms_norm_eps=1e-5, head_dim=128) | _UNTIED,
        (4096, 40, 32, 2, 13696),
    ),
}  # fmt: skip


def list_llamas() -> dict[str, dict[str, Any]]:
    """Returns the fields of config.json by hub id."""
    fields = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "intermediate_size",
    )  # fmt: skip
    return {
        name: base | dict(zip(fields, sizes, strict=True))
        for name, (base, sizes) in _CHECKPOINTS.items()
    }
