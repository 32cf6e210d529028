"""Tiny GGUF files, written as llama.cpp's convert_hf_to_gguf.py writes transformers' models."""

import numpy as np
import pytest
import transformers

gguf = pytest.importorskip("gguf")

_SIZES = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=96, max_position_embeddings=40,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_TURNS = dict(rope_parameters=dict(rope_type="default", rope_theta=50000.0))
_UNTIED = dict(tie_word_embeddings=False)
# kind: (class, GGUF architecture, config)
KINDS = {
    "llama": ("LlamaForCausalLM", "llama", _SIZES | _TURNS | _UNTIED),
    "llama-bias": (
        "LlamaForCausalLM", "llama",
        _SIZES | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "mistral": ("MistralForCausalLM", "llama", _SIZES | _TURNS | dict(sliding_window=7) | _UNTIED),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _SIZES | _TURNS | dict(head_dim=8) | _UNTIED),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _SIZES | _TURNS | dict(tie_word_embeddings=True)),
    "gemma": ("GemmaForCausalLM", "gemma", _SIZES),
    "gemma2": (
        "Gemma2ForCausalLM", "gemma2",
        _SIZES | dict(sliding_window=9, attn_logit_softcapping=20.0, query_pre_attn_scalar=16),
    ),
    "gemma3": (
        "Gemma3ForCausalLM", "gemma3",
        _SIZES | dict(sliding_window=9, num_hidden_layers=7, query_pre_attn_scalar=16),
    ),
    "phi3": (
        "Phi3ForCausalLM", "phi3",
        _SIZES | dict(head_dim=8, sliding_window=9, original_max_position_embeddings=40) | _UNTIED,
    ),
    "phi3-long": (
        "Phi3ForCausalLM", "phi3",
        _SIZES | dict(
            head_dim=8, original_max_position_embeddings=20, tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="longrope", rope_theta=100.0, partial_rotary_factor=0.75,
                short_factor=[1.0, 1.5, 2.5], long_factor=[2.0, 3.0, 4.0],
            ),
        ),
    ),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", _SIZES | _TURNS | dict(head_dim=8) | _UNTIED),
    "smollm3": (
        "SmolLM3ForCausalLM", "smollm3",
        _SIZES | _TURNS | dict(head_dim=8, num_hidden_layers=4, attention_bias=True),
    ),
    "granite": (
        "GraniteForCausalLM", "granite",
        _SIZES | _TURNS | dict(
            head_dim=8, attention_multiplier=0.25, embedding_multiplier=3.0,
            residual_multiplier=0.5, logits_scaling=2.0, tie_word_embeddings=True,
        ),
    ),
    "cohere2": (
        "Cohere2ForCausalLM", "cohere2",
        _SIZES | _TURNS | dict(
            head_dim=8, num_hidden_layers=4, sliding_window=9, logit_scale=0.5,
        ),
    ),
    "glm4": (
        "Glm4ForCausalLM", "glm4",
        _SIZES | dict(
            rope_parameters=dict(rope_type="default", rope_theta=5e4, partial_rotary_factor=0.5),
        ) | _UNTIED,
    ),
}  # fmt: skip


def make_model(kind, **changes):
    """Makes a tiny torch model of random weights, none of them trivial."""
    name, _, settings = KINDS[kind]
    cls = getattr(transformers, name)
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = cls(cls.config_class(**settings | changes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.3)
    return model


def write_model(path, model, kind, *, quant="F32", more=lambda writer: None):
    """Writes a model, matrices of a type of ggml where that has blocks that fit. -> its path

    `more` adds to the metadata.
    """
    architecture, config = KINDS[kind][1], model.config
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, config, architecture)
    more(writer)
    enum = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(enum, config.num_hidden_layers)
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, tensor in state.items():
        array = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part = name.split(".")[-2]
        if architecture in ("llama", "smollm3", "granite") and part in heads:
            split = array.reshape(heads[part], 2, -1, *array.shape[1:])
            array = split.swapaxes(1, 2).reshape(array.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        add_tensor(writer, theirs, np.ascontiguousarray(array), "F32" if array.ndim < 2 else quant)
    return finish(writer, path)


def _write_config(writer, config, architecture):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if architecture == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    turns = config.rope_parameters
    writer.add_rope_freq_base(turns.get("full_attention", turns)["rope_theta"])
    if architecture in ("phi3", "glm4"):
        writer.add_rope_dimension_count(int(config.head_dim * turns["partial_rotary_factor"]))
    if architecture == "phi3":
        _write_longrope(writer, config)
    if architecture in ("granite", "cohere2"):
        scaling = config.logit_scale if architecture == "cohere2" else config.logits_scaling
        writer.add_logit_scale(scaling)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
    if architecture not in ("qwen2", "phi3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(config.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)


def _write_longrope(writer, config):
    trained, turns = config.original_max_position_embeddings, config.rope_parameters
    writer.add_rope_scaling_orig_ctx_len(trained)
    if "short_factor" in turns:
        scale = config.max_position_embeddings / trained
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(scale) / np.log(trained)).item())
        for length in ("short", "long"):
            factors = np.array(turns[f"{length}_factor"], np.float32)
            add_tensor(writer, f"rope_factors_{length}.weight", factors)


def add_tensor(writer, name, array, quant="F32"):
    """Adds a tensor in a type of ggml."""
    kind = gguf.GGMLQuantizationType[quant]
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def finish(writer, path):
    """Writes the file. -> its path"""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
