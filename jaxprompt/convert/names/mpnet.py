"""MPNet's table of names (Song et al. 2020)."""

from jaxprompt.convert.tensors import (
    Family,
    make_decoder,
    make_linear,
    make_mlm,
    make_norm,
    make_table,
)

_LAYER = "encoder.layer.{i}."

MPNET = Family(
    prefix="mpnet.",
    trunk=(
        *make_table("embed/word", "embeddings.word_embeddings", axes="VE"),
        *make_table("embed/position", "embeddings.position_embeddings", axes="PE"),
        *make_norm("embed/norm", "embeddings.LayerNorm", "E"),
        *make_linear("layers/attention/query", _LAYER + "attention.attn.q", "H", "ND"),
        *make_linear("layers/attention/key", _LAYER + "attention.attn.k", "H", "ND"),
        *make_linear("layers/attention/value", _LAYER + "attention.attn.v", "H", "ND"),
        *make_linear("layers/attention/out", _LAYER + "attention.attn.o", "ND", "H"),
        *make_norm("layers/attention_norm", _LAYER + "attention.LayerNorm", "H"),
        *make_linear("layers/mlp/up", _LAYER + "intermediate.dense", "H", "F"),
        *make_linear("layers/mlp/down", _LAYER + "output.dense", "F", "H"),
        *make_norm("layers/mlp_norm", _LAYER + "output.LayerNorm", "H"),
        *make_table("bias", "encoder.relative_attention_bias", axes="RN"),
    ),
    heads={
        "pooler": make_linear("pooler", "pooler.dense", "H", "H"),
        "mlm": make_mlm(
            "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder.bias", "lm_head.bias"
        ),
    },
    decoder=make_decoder("lm_head.decoder.weight"),
    sizes={
        "V": "vocab_size", "P": "max_position_embeddings", "H": "hidden_size",
        "N": "num_attention_heads", "F": "intermediate_size", "L": "num_hidden_layers",
        "R": "relative_attention_num_buckets", "E": "H", "X": "E",
    },
    classes={"mlm": "ForMaskedLM"},
)  # fmt: skip
