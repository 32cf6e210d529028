"""Tiny folders as transformers saves them, of every kind that is read."""

import json

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file
from tiny import CONFIGS, MIXTURE

from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.tree import flatten

ENCODER = CONFIGS["bert"] | dict(num_attention_heads=4)
NARROW = ENCODER | dict(embedding_size=12)
T5 = CONFIGS["t5"] | dict(num_heads=4, decoder_start_token_id=0)
TIED = T5 | dict(feed_forward_proj="relu", tie_word_embeddings=True)
GPT2 = CONFIGS["gpt2"] | dict(n_head=4)
T5GEMMA = CONFIGS["t5gemma"] | {
    name: CONFIGS["t5gemma"][name] | dict(final_logit_softcapping=None)
    for name in ("encoder", "decoder")
}
UNTIED = dict(tie_word_embeddings=False)
# kind: (family, class, config)
KINDS = {
    "bert": ("bert", "BertForMaskedLM", ENCODER),
    "bert-untied": ("bert", "BertForMaskedLM", ENCODER | UNTIED),
    "bert-trunk": ("bert", "BertModel", ENCODER),
    "bert-both": ("bert", "BertForPreTraining", ENCODER),
    "roberta": ("roberta", "RobertaForMaskedLM", ENCODER | dict(pad_token_id=1)),
    "roberta-untied": ("roberta", "RobertaForMaskedLM", ENCODER | dict(pad_token_id=1) | UNTIED),
    "xlm-roberta": ("roberta", "XLMRobertaForMaskedLM", ENCODER | dict(pad_token_id=1)),
    "mpnet": ("mpnet", "MPNetForMaskedLM", ENCODER),
    "xlm-roberta-xl": (
        "xlm_roberta_xl", "XLMRobertaXLForMaskedLM", ENCODER | dict(pad_token_id=1)
    ),
    "eurobert": ("eurobert", "EuroBertForMaskedLM", CONFIGS["eurobert"] | dict(pad_token_id=0)),
    "discriminator": ("electra", "ElectraForPreTraining", NARROW),
    "generator": ("electra", "ElectraForMaskedLM", NARROW),
    "generator-untied": ("electra", "ElectraForMaskedLM", NARROW | UNTIED),
    "albert": (
        "albert", "AlbertForMaskedLM",
        CONFIGS["albert"]
        | dict(num_attention_heads=4, num_hidden_layers=3, num_hidden_groups=2, inner_group_num=2),
    ),
    "distilbert": (
        "distilbert", "DistilBertForMaskedLM", CONFIGS["distilbert"] | dict(n_heads=4)
    ),
    "deberta": ("deberta", "DebertaForMaskedLM", CONFIGS["deberta"] | dict(num_attention_heads=4)),
    "deberta-v2": (
        "deberta_v2", "DebertaV2ForMaskedLM",
        CONFIGS["deberta_v2"]
        | dict(num_attention_heads=4, conv_kernel_size=3, legacy=False),
    ),
    "deberta-v3": (
        "deberta_v2", "DebertaV2ForMaskedLM",
        CONFIGS["deberta_v2"] | dict(num_attention_heads=4, embedding_size=12),
    ),
    "t5": ("t5", "T5ForConditionalGeneration", TIED),
    "t5-gated": ("t5", "T5ForConditionalGeneration", T5),
    "mt5": ("t5", "MT5ForConditionalGeneration", T5),
    "bart": (
        "bart", "BartForConditionalGeneration",
        CONFIGS["bart"] | dict(encoder_attention_heads=4, decoder_attention_heads=4),
    ),
    "t5gemma": ("t5gemma", "T5GemmaForConditionalGeneration", T5GEMMA),
    "gpt2": ("gpt2", "GPT2LMHeadModel", GPT2),
    # Its files concatenate queries, keys and values of different sizes.
    "phi3": ("llama", "Phi3ForCausalLM", CONFIGS["llama"] | dict(pad_token_id=0) | UNTIED),
    # Its files concatenate those of a head.
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM", CONFIGS["gpt_neox"]),
    "opt": ("opt", "OPTForCausalLM", CONFIGS["opt"] | dict(num_attention_heads=4)),
    "mixtral": ("llama", "MixtralForCausalLM", CONFIGS["llama"] | MIXTURE),
    "gpt-oss": (
        "llama", "GptOssForCausalLM",
        CONFIGS["llama"] | MIXTURE | dict(model_type="gpt_oss", head_dim=6),
    ),
    "qwen3-moe": (
        "llama", "Qwen3MoeForCausalLM",
        CONFIGS["llama"]
        | MIXTURE
        | dict(model_type="qwen3_moe", moe_intermediate_size=12, head_dim=6),
    ),
}  # fmt: skip
CARD = {
    "corpus": {"texts": "a|b", "tokens": 1200}, "objective": {"name": "mlm"},
    "steps": 10, "held_out": {"mlm": {"loss": 2.3456789, "accuracy": 0.25}},
    "examples": ["the [MASK] ran\nhome -> dog"],
}  # fmt: skip


def random_model(name, config, scale=1.0):
    """Returns a random transformers model whose every value counts."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model


def load_folder(folder, family="", **options):
    """Loads a backbone; its family is model_type by default."""
    config = read_config(folder)
    return load_backbone(folder, family or config["model_type"], config, **options)


def rewrite(folder, change=lambda tensors: None, **fields):
    """Applies `change` to the tensors of a folder's file, and fields to its config."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(change(tensors) or tensors, path)
    (folder / "config.json").write_text(json.dumps(read_config(folder) | fields))


def assert_same_params(params, expected):
    """Compares parameters bit for bit."""
    params, expected = flatten(params), flatten(expected)
    assert params.keys() == expected.keys()
    for name, leaf in expected.items():
        assert params[name].dtype == leaf.dtype and params[name].shape == leaf.shape
        assert np.asarray(params[name]).tobytes() == np.asarray(leaf).tobytes(), name


def save_model(folder, kind):
    """Saves a random transformers model whose every value counts, and a tokenizer's file."""
    family, name, config = KINDS[kind]
    random_model(name, config, 0.1).save_pretrained(folder)
    if family == "t5" and not config["tie_word_embeddings"]:  # transformers 5 ties every T5
        tensors, table = load_file(folder / "model.safetensors"), np.random.default_rng(0)
        tensors["lm_head.weight"] = table.normal(size=(53, 16)).astype(np.float32)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        path = folder / "config.json"
        path.write_text(json.dumps(read_config(folder) | UNTIED))
    (folder / "tokenizer.json").write_text("{}")
