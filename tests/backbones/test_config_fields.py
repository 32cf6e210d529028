"""Every field of a transformers config is honoured, refused by name, or changes no function."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest
from tiny import CONFIGS, MIXTURE
from transformers import (
    AlbertConfig,
    AutoConfig,
    BartConfig,
    BertConfig,
    Cohere2Config,
    DebertaConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    EuroBertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    ModernBertConfig,
    MPNetConfig,
    MT5Config,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
    SmolLM3Config,
    T5Config,
    T5GemmaConfig,
    XLMRobertaConfig,
    XLMRobertaXLConfig,
)

from jaxprompt.backbones import make_backbone
from jaxprompt.build.backbone import backbone_from_config
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert.llama_fields import MODEL_TYPES
from jaxprompt.errors import InputError

RELATIVE = dict(
    relative_attention=True, pos_att_type=["p2c", "c2p"], position_biased_input=False,
    embedding_size=24,
)  # fmt: skip
V2 = RELATIVE | dict(
    position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True, conv_kernel_size=3,
    conv_act="gelu", conv_groups=1, attention_head_size=64,
)  # fmt: skip
LOCAL = dict(use_sliding_window=True, sliding_window=64, max_window_layers=2)
LONG = dict(rope_type="longrope", short_factor=[1.5] * 48, long_factor=[2.0] * 48)
CLASSES = {
    "llama": LlamaConfig, "mistral": MistralConfig, "gemma": GemmaConfig, "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "qwen2": functools.partial(Qwen2Config, **LOCAL),
    "qwen3": functools.partial(Qwen3Config, **LOCAL),
    "ministral": MinistralConfig, "olmo2": Olmo2Config, "olmo3": Olmo3Config,
    "granite": GraniteConfig, "cohere2": Cohere2Config, "glm4": Glm4Config,
    "phi3": functools.partial(
        Phi3Config, rope_parameters=LONG, sliding_window=64, max_position_embeddings=131072
    ),
    "smollm3": functools.partial(SmolLM3Config, use_sliding_window=True, sliding_window=64),
    "mixtral": MixtralConfig, "eurobert": EuroBertConfig, "mpnet": MPNetConfig,
    "xlm-roberta-xl": XLMRobertaXLConfig,
    "gpt_oss": GptOssConfig, "t5gemma": T5GemmaConfig,
    "qwen3_moe": functools.partial(Qwen3MoeConfig, use_sliding_window=True, sliding_window=64),
    "albert": AlbertConfig, "modernbert": ModernBertConfig, "distilbert": DistilBertConfig,
    "deberta": functools.partial(DebertaConfig, talking_head=False, **RELATIVE),
    "deberta-v2": functools.partial(DebertaV2Config, **V2),
    "bert": BertConfig, "roberta": RobertaConfig, "xlm-roberta": XLMRobertaConfig,
    "bart": BartConfig, "electra": ElectraConfig, "t5": T5Config, "mt5": MT5Config,
    "gpt2": GPT2Config, "gpt_neox": GPTNeoXConfig, "opt": OPTConfig,
}  # fmt: skip
FAMILIES = {
    "xlm-roberta": "roberta", "xlm-roberta-xl": "xlm_roberta_xl", "mt5": "t5",
    "deberta-v2": "deberta_v2",
}  # fmt: skip
FAMILIES |= {name: kind.family for name, kind in MODEL_TYPES.items()}
# What is read elsewhere, of heads that are not these, of how a model runs, or of random weights.
ELSEWHERE = {
    "architectures", "model_type", "transformers_version", "_name_or_path", "dtype", "torch_dtype",
    "id2label", "label2id", "problem_type", "output_attentions", "output_hidden_states",
    "return_dict", "use_cache", "chunk_size_feed_forward", "initializer_range",
    "initializer_factor", "classifier_dropout", "summary_type", "summary_use_proj",
    "summary_activation", "summary_last_dropout", "summary_proj_to_labels", "summary_first_dropout",
    "reorder_and_upcast_attn", "bos_token_id", "eos_token_id", "pooler_dropout",
    "classifier_dropout_prob", "classifier_pooling", "cls_token_id", "sep_token_id",
    "deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index",
    "initializer_cutoff_factor", "pretraining_tp", "sinusoidal_pos_embds", "qa_dropout",
    "seq_classif_dropout", "init_std", "encoder_layerdrop", "decoder_layerdrop", "layerdrop",
    "output_router_logits", "router_aux_loss_coef", "mask_token_id",
    "classifier_dropout_rate",
}  # fmt: skip
# T5 derives both from feed_forward_proj, whatever config.json says.
DERIVED = {"dense_act_fn", "is_gated_act"}
# What layer_types, which transformers always writes, was made of.
DERIVED |= {"max_window_layers", "_sliding_window_pattern", "no_rope_layer_interval"}
# Of an MLP in place of the experts, which no layer has; beside those of encoder and decoder; and a
# GPT-NeoX is a decoder, whatever this says.
UNUSED = {
    ("qwen3_moe", "intermediate_size"), ("t5gemma", "vocab_size"), ("gpt_neox", "is_decoder"),
}  # fmt: skip
# The embeddings at a pad are zero in torch, and no real token reads them.
PADS = {"pad_token_id"}
OTHER = {
    "hidden_act": "relu", "activation_function": "relu", "feed_forward_proj": "gated-gelu",
    "n_inner": 72, "is_encoder_decoder": None, "num_decoder_layers": 3,
}  # fmt: skip


def other(name, value):
    """Gives a field another value of its kind."""
    if OTHER.get(name) not in (None, value):
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value or 4
    if isinstance(value, float):
        return value / 2 or 0.25
    if isinstance(value, str):
        return "silu" if value == "relu" else "relu"
    return 7


def fields():
    return [(kind, name) for kind, cls in CLASSES.items() for name in cls().to_dict()]


def make(kind, hf):
    return make_backbone(FAMILIES.get(kind, kind), hf, ("lm",)).cfg


@pytest.mark.parametrize("kind, name", fields())
def test_every_field(kind, name):
    hf = CLASSES[kind]().to_dict()
    hf.setdefault("decoder_start_token_id", 0)
    before, changed = make(kind, hf), hf | {name: other(name, hf[name])}
    ignored = name in ELSEWHERE | DERIVED or (kind, name) in UNUSED
    ignored |= name in PADS and "roberta" not in kind
    is_distinct = kind == "mt5" or kind in MODEL_TYPES  # what one family's model types differ in
    ignored &= not (is_distinct and name == "model_type")
    try:
        after = make(kind, changed)
    except InputError as error:
        assert name in str(error) and not ignored
        return
    assert (after == before) == ignored, f"{name}={changed[name]!r} changes nothing, unsaid"


@pytest.mark.parametrize("kind", CLASSES)
def test_a_field_that_is_absent_is_what_transformers_takes(kind):
    """Or is refused by name. The class of transformers fills in what a config leaves out."""
    named = {name: value for name, value in CLASSES[kind]().to_dict().items() if name != "dtype"}
    named.setdefault("decoder_start_token_id", 0)
    # Without these two other fields of the Llama family are read.
    older = {n: x for n, x in named.items() if n not in ("layer_types", "rope_parameters")}
    for hf in (named, older):
        for name in hf.keys() - {"model_type"}:
            cut = {field: value for field, value in hf.items() if field != name}
            try:
                actual = make(kind, cut)
            except InputError as error:
                assert name in str(error)
                continue
            assert actual == make(kind, AutoConfig.for_model(**cut).to_dict()), name


@pytest.mark.parametrize("kind", [kind for kind in MODEL_TYPES if kind != "gpt_oss"])
def test_a_gelu_is_the_one_that_transformers_takes(kind):
    name = "hidden_activation" if kind in ("gemma2", "gemma3_text") else "hidden_act"
    hf = CLASSES[kind]().to_dict() | {name: "gelu"}
    assert make(kind, hf).activation == getattr(AutoConfig.for_model(**hf), name)


RATES = (  # dropout, attention_dropout, the resulting attention dropout
    (None, None, 0.25), (0.5, None, 0.25), (0.0, None, 0.0), (None, 0.0, 0.0), (0.5, 0.0, 0.0),
    (0.0, 0.125, 0.125),
)  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_attention_has_a_separate_dropout_rate(family):
    """Unset, it is the checkpoint's, except that a dropout of 0 turns it off."""
    names = "attention_probs_dropout_prob attention_dropout attention_dropout_prob attn_pdrop"
    hf = CONFIGS[family] | dict.fromkeys([*names.split(), "dropout_rate"], 0.25)

    def make(**rates):
        config = BackboneConfig(family=family, **rates)
        return backbone_from_config(config, Path("config.json"), hf, ("pooler",)).module.cfg

    for dropout, rate, expected in RATES:
        hidden_only = make(dropout=dropout)
        actual = make(dropout=dropout, attention_dropout=rate)
        assert actual == dataclasses.replace(hidden_only, attention_dropout=expected)
        rates = BackboneConfig(dropout=dropout, attention_dropout=rate)
        assert rates.may_drop == (dropout != 0.0 or expected > 0.0)


BAD = [  # family, changes, what the message names
    ("bert", dict(is_decoder=True), "is_decoder=true"),
    ("roberta", dict(is_decoder=True), "is_decoder=true"),
    ("electra", dict(is_decoder=True), "is_decoder=true"),
    ("deberta", dict(talking_head=True), "talking_head=true"),
    ("deberta", dict(pos_att_type="p2p|c2p"), "pos_att_type=.* a list of c2p, p2c"),
    ("deberta_v2", dict(norm_rel_ebd="rms"), "norm_rel_ebd=.*rms"),
    ("deberta_v2", dict(conv_kernel_size=4), "conv_kernel_size=4 must be odd"),
    ("deberta_v2", dict(conv_kernel_size=3, conv_groups=2), "conv_groups=2"),
    ("deberta_v2", dict(legacy=False, embedding_size=8), "legacy=false"),
    ("albert", dict(num_hidden_groups=3), "num_hidden_groups=3"),
    ("albert", dict(inner_group_num=2**31 - 1), "inner_group_num=2147483647.* from 1 to 1,000"),
    ("mpnet", dict(relative_attention_num_buckets=64), "relative_attention_num_buckets=64"),
    ("mpnet", dict(max_position_embeddings=2), "pad_token_id=1 leaves no position"),
    ("xlm_roberta_xl", dict(is_decoder=True), "is_decoder=true"),
    ("eurobert", dict(num_key_value_heads=3), "num_key_value_heads=3"),
    ("modernbert", dict(num_hidden_layers=1), "num_hidden_layers=1"),
    ("modernbert", dict(rope_scaling={"factor": 2.0}), "rope_scaling"),
    ("modernbert", dict(rope_parameters={"full_attention": {"rope_type": "yarn"}}), "yarn"),
    ("modernbert", dict(rope_parameters={"rope_theta": 50.0}), "rope_parameters=.* rope_theta"),
    ("distilbert", dict(n_heads=5), "dim=16 .* n_heads=5"),
    ("gpt2", dict(n_head=5), "n_embd=16 .* n_head=5"),
    ("gpt2", dict(activation_function="swish"), "activation_function='swish'"),
    ("gpt2", dict(add_cross_attention=True), "add_cross_attention=true"),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=true"),
    ("gpt2", dict(n_embd="16"), "n_embd='16'.* integer from 1"),
    ("gpt2", dict(n_inner=0), "n_inner=0.* integer from 1"),
    ("gpt2", dict(n_layer=1001), "n_layer=1001.* from 1 to 1,000"),
    ("gpt2", dict(n_positions=None), "n_positions=None.* integer"),
    ("t5", dict(pad_token_id=None), "lacks decoder_start_token_id"),
    ("t5", dict(feed_forward_proj="gated-swish"), "feed_forward_proj='gated-swish' .* gelu, "),
    ("t5", dict(feed_forward_proj="double-relu"), "feed_forward_proj='double-relu'"),
    ("t5", dict(num_layers=2**31 - 1), "num_layers=2147483647.* from 1 to 1,000"),
    ("t5", dict(num_decoder_layers=1001), "num_decoder_layers=1001.* from 1 to 1,000"),
    ("t5", dict(num_decoder_layers=-1), "num_decoder_layers=-1"),
    ("bart", dict(decoder_attention_heads=4), "decoder_attention_heads=4"),
    ("bart", dict(decoder_ffn_dim=12), "decoder_ffn_dim=12"),
    ("llama", MIXTURE | dict(router_jitter_noise=0.1), "router_jitter_noise=0.1"),
    ("llama", MIXTURE | dict(model_type="gpt_oss", hidden_act="gelu"), "hidden_act='gelu'"),
    ("llama", MIXTURE | dict(mlp_only_layers=[1]), r"mlp_only_layers=\[1\]"),
    ("llama", MIXTURE | dict(decoder_sparse_step=2), "decoder_sparse_step=2"),
    ("llama", MIXTURE | dict(num_experts_per_tok=5), "num_experts_per_tok=5 .*num_local_experts=4"),
    ("glm", dict(block_position_encoding=False), "block_position_encoding=false.*glm-2b"),
    ("glm", dict(relative_encoding=True), "relative_encoding=true"),
    ("glm", dict(spell_length=3), "spell_length"),
    ("glm", dict(attention_scale=8.0), "attention_scale=8.0"),
    ("glm", dict(num_attention_heads=5), "hidden_size=16 .* num_attention_heads=5"),
]


def test_what_experts_and_sinks_do_not_support_is_refused():
    hf = CONFIGS["llama"] | MIXTURE
    config = BackboneConfig(family="llama", quantize="int8")
    with pytest.raises(InputError, match="backbone.quantize=int8 is not supported .* experts"):
        backbone_from_config(config, Path("config.json"), hf, ("lm",))
    with pytest.raises(InputError, match="attention=fused is not supported for gpt_oss"):
        make_backbone("llama", hf | dict(model_type="gpt_oss"), ("lm",), attention="fused")


@pytest.mark.parametrize("family, changes, words", BAD)
def test_what_is_not_supported_is_refused_by_name(family, changes, words):
    with pytest.raises(InputError, match=words):
        make_backbone(family, CONFIGS[family] | changes, ("lm",))


@pytest.mark.parametrize(
    "family, width, parameters",
    # Matrices [H, H] of two layers and of the heads; [H, 4H] count four times. The rest is small.
    [("bert", "hidden_size", 10 * 2**56), ("gpt2", "n_embd", 24 * 2**56)],
)
def test_a_model_that_no_memory_holds_is_refused(family, width, parameters):
    hf = CONFIGS[family] | {width: 2**28}
    with pytest.raises(InputError) as error:
        backbone_from_config(
            BackboneConfig(family=family), Path("config.json"), hf, ("pooler", "mlm")
        )
    count = int(re.search("of ([0-9,]+) parameters", str(error.value))[1].replace(",", ""))
    assert count == pytest.approx(parameters, rel=0.01)
