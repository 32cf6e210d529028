"""The Llama family against torch: models to 1e-4, float32, random weights of odd shapes."""

import numpy as np
import pytest
import transformers
from pairs import (
    assert_near,
    draw_tokens,
    make_batch,
    make_tokens,
    pair_fixture,
    randomise,
    read_pair,
    run,
    run_torch,
)

from jaxprompt.errors import InputError
from jaxprompt.types import Injection, Prefix, Stream

torch = pytest.importorskip("torch")

MODEL = 1e-4  # max abs, float32
SIZES = dict(
    vocab_size=60, hidden_size=24, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, intermediate_size=36, max_position_embeddings=40, head_dim=6,
    pad_token_id=0, bos_token_id=2, eos_token_id=1,
)  # fmt: skip
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=10, rope_theta=100.0)
_LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16, rope_theta=500.0,
)  # fmt: skip
CAUSAL = {
    "llama": transformers.LlamaForCausalLM, "mistral": transformers.MistralForCausalLM,
    "ministral": transformers.MinistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM, "qwen3": transformers.Qwen3ForCausalLM,
    "gemma": transformers.GemmaForCausalLM, "gemma2": transformers.Gemma2ForCausalLM,
    "gemma3": transformers.Gemma3ForCausalLM, "phi3": transformers.Phi3ForCausalLM,
    "olmo2": transformers.Olmo2ForCausalLM, "olmo3": transformers.Olmo3ForCausalLM,
    "smollm3": transformers.SmolLM3ForCausalLM, "granite": transformers.GraniteForCausalLM,
    "cohere2": transformers.Cohere2ForCausalLM, "glm4": transformers.Glm4ForCausalLM,
    "gpt_neox": transformers.GPTNeoXForCausalLM, "mixtral": transformers.MixtralForCausalLM,
    "qwen3_moe": transformers.Qwen3MoeForCausalLM, "gpt_oss": transformers.GptOssForCausalLM,
}  # fmt: skip
_LONGROPE = dict(
    rope_type="longrope", short_factor=[1.0, 1.5], long_factor=[2.0, 4.0], rope_theta=100.0,
    partial_rotary_factor=0.75,
)  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
# Weights with which the experts move the logits as much as the attention does.
_EXPERTS = dict(num_experts_per_tok=2, initializer_range=0.2)
_QWEN3_MOE = _EXPERTS | dict(num_experts=5, moe_intermediate_size=20)
# kind -> model type, changes
KINDS = {
    "llama": ("llama", dict(tie_word_embeddings=True)),
    "llama biased": ("llama", dict(attention_bias=True, mlp_bias=True, num_key_value_heads=6)),
    "llama one head of keys": ("llama", dict(num_key_value_heads=1, rope_theta=100000.0)),
    "linear": ("llama", dict(rope_parameters=dict(rope_type="linear", factor=4.0))),
    "dynamic": ("llama", dict(rope_parameters=dict(rope_type="dynamic", factor=4.0))),
    "llama3": ("llama", dict(rope_parameters=_LLAMA3)),
    "yarn": ("llama", dict(rope_parameters=_YARN)),
    "yarn truncated": (
        "llama",
        dict(rope_parameters=_YARN | dict(truncate=False, mscale=0.7, mscale_all_dim=1.0)),
    ),
    "yarn with a factor": (
        "llama", dict(rope_parameters=_YARN | dict(attention_factor=1.3, beta_fast=16)),
    ),
    "mistral": ("mistral", dict(attention_bias=True, sliding_window=4)),
    # A token less than the text of `test_model`, as many as that of `test_prefix` with its prefix.
    "mistral wide": ("mistral", dict(sliding_window=11)),
    "mistral global": ("mistral", dict(sliding_window=None)),
    "qwen2": ("qwen2", {}),
    "qwen2 local": (
        "qwen2", dict(use_sliding_window=True, sliding_window=3, max_window_layers=1),
    ),
    "qwen3": ("qwen3", dict(attention_bias=True)),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", dict(sliding_window=3, query_pre_attn_scalar=10)),
    "gemma2 uncapped": (
        "gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=None),
    ),
    "gemma3": ("gemma3", dict(sliding_window=4, sliding_window_pattern=2)),
    "mixtral": ("mixtral", _EXPERTS | dict(num_local_experts=4, rope_theta=100.0)),
    "mixtral local": ("mixtral", _EXPERTS | dict(num_local_experts=3, sliding_window=4)),
    "qwen3_moe": ("qwen3_moe", _QWEN3_MOE | dict(attention_bias=True)),
    "qwen3_moe normalized": (
        "qwen3_moe",
        _QWEN3_MOE | dict(norm_topk_prob=True, use_sliding_window=True, sliding_window=5),
    ),
    "gpt_oss": (
        "gpt_oss",
        _EXPERTS | dict(num_local_experts=4, sliding_window=5, swiglu_alpha=1.3, swiglu_limit=0.4,
                        rope_parameters=_YARN),
    ),
    "gpt_oss unbiased": (
        "gpt_oss", _EXPERTS | dict(num_local_experts=3, attention_bias=False),
    ),
    "gemma3 capped": ("gemma3", dict(sliding_window=4, final_logit_softcapping=2.0)),
    "ministral": ("ministral", dict(sliding_window=4, layer_types=_ALTERNATING)),
    # Four of six dimensions rotate, and the text is shorter than the trained length.
    "phi3": (
        "phi3", dict(rope_parameters=_LONGROPE, original_max_position_embeddings=20),
    ),
    "phi3 local": ("phi3", dict(sliding_window=4, num_key_value_heads=6)),
    "olmo2": ("olmo2", dict(attention_bias=True)),
    "olmo3": (
        "olmo3", dict(
            sliding_window=4, layer_types=_ALTERNATING,
            rope_parameters=dict(full_attention=_YARN, sliding_attention=dict(rope_theta=100.0)),
        ),
    ),
    "smollm3": ("smollm3", dict(no_rope_layer_interval=2, attention_bias=True, mlp_bias=True)),
    "smollm3 local": (
        "smollm3", dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=4),
    ),
    "granite": (
        "granite", dict(
            embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.7,
            logits_scaling=2.0, attention_bias=True, mlp_bias=True,
        ),
    ),
    "cohere2": ("cohere2", dict(sliding_window=4, layer_types=_ALTERNATING, logit_scale=0.5)),
    "gpt_neox": ("gpt_neox", dict(rotary_pct=0.67, hidden_act="gelu_fast")),
    "gpt_neox sequential": (
        "gpt_neox", dict(rotary_pct=1.0, use_parallel_residual=False, attention_bias=False),
    ),
    "glm4": ("glm4", dict(rope_parameters=dict(partial_rotary_factor=0.67, rope_theta=100.0))),
}  # fmt: skip


def make_pair(folder, kind):
    torch.manual_seed(len(kind))
    name, changes = KINDS[kind]
    sizes = {k: v for k, v in (SIZES | changes).items() if (k, name) != ("head_dim", "qwen2")}
    if name in ("qwen2", "phi3", "gpt_neox"):  # heads of width / heads dimensions
        sizes["hidden_size"] = 36
    model_class = CAUSAL[name]
    randomise(model_class(model_class.config_class(**sizes))).save_pretrained(folder)
    family = "gpt_neox" if name == "gpt_neox" else "llama"
    return read_pair(folder, family, model_class)


pairs = pair_fixture(make_pair)


# Of the model types with other blocks, "phi3", "olmo3" and "cohere2" have most of what differs.
@pytest.mark.long_cases(
    "left-*", "right-ministral", "right-phi3 local", "right-olmo2", "right-smollm3*",
    "right-granite", "right-glm4", "right-gpt_neox*", "right-mixtral local", "right-qwen3_moe*",
    "right-gpt_oss unbiased",
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_model(pairs, kind, side):
    pair = pairs(kind)
    tokens = draw_tokens(60, side, lengths=(12, 7, 1), width=12)
    with torch.no_grad():
        expected = run_torch(pair.torch, tokens)
    hidden, logits = run(pair, make_batch(tokens))
    assert_near(hidden, expected.hidden_states[-1], MODEL, tokens.mask)
    assert_near(logits, expected.logits, MODEL, tokens.mask)
    assert np.asarray(hidden)[tokens.mask].std() > 0.3


@pytest.mark.default_cases("llama", "mistral", "qwen3", "gemma2")
@pytest.mark.parametrize(
    "kind",
    [
        "llama", "mistral", "mistral wide", "qwen3", "gemma2", "gemma3", "cohere2", "olmo3", "phi3",
        "smollm3 local", "glm4", "granite", "gpt_neox", "mixtral local", "qwen3_moe", "gpt_oss",
    ],
)  # fmt: skip
def test_prefix(pairs, kind):
    """Past keys of transformers, in front of the text: not turned, in the windows."""
    pair = pairs(kind)
    config = pair.module.cfg
    length, rng = 2, np.random.default_rng(1)
    k, v = rng.normal(size=(2, config.layers, 1, length, config.key_heads, config.head_dim)).astype(
        np.float32
    )
    tokens = draw_tokens(60, "right", lengths=(9, 9, 5), width=9)
    tokens = make_tokens(tokens.ids, tokens.mask, positions=np.arange(9) * tokens.mask + length)
    past = transformers.DynamicCache(config=pair.torch.config)
    for layer in range(config.layers):
        lay = lambda x, layer=layer: torch.tensor(x[layer]).transpose(1, 2).repeat(3, 1, 1, 1)
        past.update(lay(k), lay(v), layer)
    with torch.no_grad():
        expected = run_torch(pair.torch, tokens, past).logits
    mask = np.ones((config.layers, 1, length), bool)
    prefix = Prefix(k, v, mask, np.arange(length, dtype=np.int32))
    _, logits = run(pair, make_batch(tokens), Injection(Stream(prefix=prefix)))
    assert_near(logits, expected, MODEL, tokens.mask)
    _, without = run(pair, make_batch(tokens))
    assert np.abs(np.asarray(without) - np.asarray(logits)).max() > 0.01


def test_a_prefix_longer_than_the_window_is_refused(pairs):
    pair = pairs("gemma2")
    config, length = pair.module.cfg, 3
    k = np.zeros((config.layers, 1, length, config.key_heads, config.head_dim), np.float32)
    prefix = Prefix(
        k, k, np.ones((config.layers, 1, length), bool), np.arange(length, dtype=np.int32)
    )
    batch = make_batch(draw_tokens(60))
    with pytest.raises(InputError, match="of 3 tokens does not fit the window of 3 tokens"):
        run(pair, batch, Injection(Stream(prefix=prefix)))
    outside = prefix._replace(positions=None)  # prompt.shift=False
    run(pair, batch, Injection(Stream(prefix=outside)))
