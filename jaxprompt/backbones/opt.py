"""OPT: GPT-2's decoder with relu, and positions that start after two unused rows (Zhang et al.
2022).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxprompt.backbones import gpt2, read_width
from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_size,
    read_word,
    refuse_flags,
)
from jaxprompt.convert.names.opt import POSITION_OFFSET
from jaxprompt.errors import InputError
from jaxprompt.layers.mlp import ACTIVATIONS

Backbone = gpt2.Backbone
_REQUIRED_FLAGS = ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine")


def make_config(hf: Mapping[str, Any], **changes: Any) -> gpt2.GPT2Config:
    """Reads a config. Raises InputError if it needs an unsupported feature."""
    refuse_flags(hf, "_remove_final_layer_norm", "add_cross_attention", "is_encoder_decoder")
    for field in _REQUIRED_FLAGS:
        if not read_flag(hf, field, True):
            raise InputError(f"{field}=false is not supported; use another OPT, e.g. opt-125m")
    width, heads = read_width(hf)
    embed = read_size(hf, "word_embed_proj_dim", width)
    if embed != width:
        raise InputError(
            f"word_embed_proj_dim={embed} must be hidden_size={width}; use another OPT, e.g. "
            "opt-125m"
        )
    config = gpt2.GPT2Config(
        vocab=read_size(hf, "vocab_size"),
        width=width,
        layers=read_size(hf, "num_hidden_layers"),
        heads=heads,
        mlp=read_size(hf, "ffn_dim"),
        positions=read_size(hf, "max_position_embeddings", 2048),
        position_offset=POSITION_OFFSET,
        activation=read_word(hf, "activation_function", "relu", ACTIVATIONS),
        embed_dropout=0.0,
        dropout=read_dropout(hf, "dropout", 0.1),
        attention_dropout=read_dropout(hf, "attention_dropout", 0.0),
        tied=read_flag(hf, "tie_word_embeddings", True),
    )
    return dataclasses.replace(config, **changes)
