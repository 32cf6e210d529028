"""ALBERT's table of names (Lan et al. 2020): shared layers are in the file once."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.convert.hf_config import read_size
from jaxprompt.convert.tensors import (
    Family,
    make_decoder,
    make_linear,
    make_mlm,
    make_norm,
    make_table,
)

EMBED = 128  # the default of transformers


def _derive(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    embed = read_size(config, "embedding_size", EMBED)
    groups, inner = (read_size(config, x, 1) for x in ("num_hidden_groups", "inner_group_num"))
    return {"E": embed, "X": embed, "I": inner, "L": groups * inner}


_LAYER = "encoder.albert_layer_groups.{g}.albert_layers.{i}."

ALBERT = Family(
    prefix="albert.",
    trunk=(
        *make_table("embed/word", "embeddings.word_embeddings", axes="VE"),
        *make_table("embed/position", "embeddings.position_embeddings", axes="PE"),
        *make_table("embed/type", "embeddings.token_type_embeddings", axes="SE"),
        *make_norm("embed/norm", "embeddings.LayerNorm", "E"),
        *make_linear("embed/project", "encoder.embedding_hidden_mapping_in", "E", "H"),
        *make_linear("layers/attention/query", _LAYER + "attention.query", "H", "ND"),
        *make_linear("layers/attention/key", _LAYER + "attention.key", "H", "ND"),
        *make_linear("layers/attention/value", _LAYER + "attention.value", "H", "ND"),
        *make_linear("layers/attention/out", _LAYER + "attention.dense", "ND", "H"),
        *make_norm("layers/attention_norm", _LAYER + "attention.LayerNorm", "H"),
        *make_linear("layers/mlp/up", _LAYER + "ffn", "H", "F"),
        *make_linear("layers/mlp/down", _LAYER + "ffn_output", "F", "H"),
        *make_norm("layers/mlp_norm", _LAYER + "full_layer_layer_norm", "H"),
    ),
    heads={
        "pooler": make_linear("pooler", "pooler", "H", "H"),
        "mlm": make_mlm(
            "predictions.dense", "predictions.LayerNorm", "predictions.decoder.bias",
            "predictions.bias",
        ),
    },
    decoder=make_decoder("predictions.decoder.weight"),
    sizes={
        "V": "vocab_size", "P": "max_position_embeddings", "S": "type_vocab_size",
        "H": "hidden_size", "N": "num_attention_heads", "F": "intermediate_size",
    },
    classes={"mlm": "ForMaskedLM"},
    derive=_derive,
)  # fmt: skip
