"""DistilBERT's table of names (Sanh et al. 2019)."""

from jaxprompt.convert.tensors import (
    Family,
    make_decoder,
    make_linear,
    make_mlm,
    make_norm,
    make_table,
)

_LAYER = "transformer.layer.{i}."

DISTILBERT = Family(
    prefix="distilbert.",
    trunk=(
        *make_table("embed/word", "embeddings.word_embeddings", axes="VE"),
        *make_table("embed/position", "embeddings.position_embeddings", axes="PE"),
        *make_norm("embed/norm", "embeddings.LayerNorm", "E"),
        *make_linear("layers/attention/query", _LAYER + "attention.q_lin", "H", "ND"),
        *make_linear("layers/attention/key", _LAYER + "attention.k_lin", "H", "ND"),
        *make_linear("layers/attention/value", _LAYER + "attention.v_lin", "H", "ND"),
        *make_linear("layers/attention/out", _LAYER + "attention.out_lin", "ND", "H"),
        *make_norm("layers/attention_norm", _LAYER + "sa_layer_norm", "H"),
        *make_linear("layers/mlp/up", _LAYER + "ffn.lin1", "H", "F"),
        *make_linear("layers/mlp/down", _LAYER + "ffn.lin2", "F", "H"),
        *make_norm("layers/mlp_norm", _LAYER + "output_layer_norm", "H"),
    ),
    heads={"mlm": make_mlm("vocab_transform", "vocab_layer_norm", "vocab_projector.bias")},
    decoder=make_decoder("vocab_projector.weight"),
    sizes={
        "V": "vocab_size", "P": "max_position_embeddings", "H": "dim", "N": "n_heads",
        "F": "hidden_dim", "L": "n_layers", "E": "H", "X": "E",
    },
    classes={"mlm": "ForMaskedLM"},
)  # fmt: skip
