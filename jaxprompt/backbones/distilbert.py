"""DistilBERT: BERT's encoder without segments and pooler (Sanh et al. 2019)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxprompt.backbones import read_width
from jaxprompt.backbones.bert import Encoder, EncoderConfig
from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_size,
    read_word,
    refuse_flags,
)
from jaxprompt.layers.mlp import ACTIVATIONS


def make_config(hf: Mapping[str, Any], **changes: Any) -> EncoderConfig:
    """Reads a DistilBERT config. Raises InputError if it needs an unsupported feature."""
    refuse_flags(hf, "is_encoder_decoder")
    width, heads = read_width(hf, "dim", "n_heads")
    activation = read_word(hf, "activation", "gelu", ACTIVATIONS)
    config = EncoderConfig(
        vocab=read_size(hf, "vocab_size"),
        width=width,
        embed=width,
        layers=read_size(hf, "n_layers"),
        heads=heads,
        mlp=read_size(hf, "hidden_dim"),
        positions=read_size(hf, "max_position_embeddings"),
        types=0,
        activation=activation,
        lm_activation=activation,
        lm_width=width,
        dropout=read_dropout(hf, "dropout", 0.1),
        attention_dropout=read_dropout(hf, "attention_dropout", 0.1),
        tied=read_flag(hf, "tie_word_embeddings", True),
    )
    return dataclasses.replace(config, **changes)


Backbone = Encoder
