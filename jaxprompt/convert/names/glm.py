"""The names of our parameters in the released GLM (Du et al. 2022)."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.convert.tensors import (
    Family,
    Tensor,
    make_decoder,
    make_linear,
    make_norm,
    make_table,
)

_LAYER = "transformer.layers.{i}."


def _linear(path: str, source: str, into: str, out: str, part=(0, 1)) -> list[Tensor]:
    tensors = make_linear(f"layers/{path}", _LAYER + source, into, out)
    return [tensor._replace(part=part) for tensor in tensors]


def _layers() -> tuple[Tensor, ...]:
    # Query, key and value are one layer, in this order.
    parts = enumerate(("query", "key", "value"))
    fused = "attention.query_key_value"
    return (
        *(t for i, x in parts for t in _linear(f"attention/{x}", fused, "H", "ND", (i, 3))),
        *_linear("attention/out", "attention.dense", "ND", "H"),
        *_linear("mlp/up", "mlp.dense_h_to_4h", "H", "F"),
        *_linear("mlp/down", "mlp.dense_4h_to_h", "F", "H"),
        *make_norm("layers/attention_norm", _LAYER + "input_layernorm", "H"),
        *make_norm("layers/mlp_norm", _LAYER + "post_attention_layernorm", "H"),
    )


def _derive(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    # One more position than the longest sequence, in both tables.
    return {"P": sizes["M"] + 1, "F": 4 * sizes["H"]}


GLM = Family(
    prefix="glm.",
    trunk=(
        *make_table("embed/word", "word_embeddings", axes="VE"),
        *make_table("embed/position", "transformer.position_embeddings", axes="PE"),
        *make_table("embed/inner", "transformer.block_position_embeddings", axes="PE"),
        *_layers(),
        *make_norm("norm", "transformer.final_layernorm", "H"),
    ),
    heads={},
    decoder=make_decoder("lm_head.weight", "lm/table"),
    sizes={
        "V": "vocab_size", "M": "max_sequence_length", "H": "hidden_size",
        "N": "num_attention_heads", "L": "num_layers", "E": "H", "X": "E",
    },
    always=("lm",),
    derive=_derive,
)  # fmt: skip
