"""GPT-NeoX and Pythia: Llama's layers with other parts (Black et al. 2022; Biderman et al. 2023).

LayerNorms, MLPs without gates, and an attention and an MLP that read the same state.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxprompt.backbones import llama, read_width
from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_positive,
    read_size,
    read_tied,
    read_word,
    refuse_flags,
)
from jaxprompt.convert.llama_fields import Rotations
from jaxprompt.convert.rope import read_rotary
from jaxprompt.layers.mlp import ACTIVATIONS

Backbone = llama.Backbone


def make_config(hf: Mapping[str, Any], **changes: Any) -> llama.LlamaConfig:
    """Reads a config. Raises InputError if it needs an unsupported feature."""
    refuse_flags(hf, "add_cross_attention", "is_encoder_decoder")
    width, heads = read_width(hf, multiple=2)
    layers = read_size(hf, "num_hidden_layers")
    positions = read_size(hf, "max_position_embeddings", 2048)
    # The names before transformers 5.
    theta, part = read_positive(hf, "rotary_emb_base", 1e4), read_positive(hf, "rotary_pct", 0.25)
    rotary = read_rotary(hf, width // heads, positions, theta=theta, part=part)
    biases = {"norm", "mlp"}
    if read_flag(hf, "attention_bias", True):
        biases |= {"qkv", "out"}
    dropout = read_dropout(hf, "hidden_dropout", 0.0)
    config = llama.LlamaConfig(
        vocab=read_size(hf, "vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        key_heads=heads,
        head_dim=width // heads,
        mlp=read_size(hf, "intermediate_size"),
        positions=min(positions, rotary.limit or positions),
        rotations=Rotations((rotary,), (0,) * layers),
        is_local=(False,) * layers,
        activation=read_word(hf, "hidden_act", "gelu", ACTIVATIONS),
        eps=read_positive(hf, "layer_norm_eps", 1e-5),
        biases=frozenset(biases),
        centred=True,
        parallel=read_flag(hf, "use_parallel_residual", True),
        gated=False,
        embed_dropout=dropout,
        dropout=dropout,
        attention_dropout=read_dropout(hf, "attention_dropout", 0.0),
        tied=read_tied(hf, "gpt_neox"),
    )
    return dataclasses.replace(config, **changes)
