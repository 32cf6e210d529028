"""OPT's table of names."""

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

POSITION_OFFSET = 2  # rows of the position table before that of position 0


def _derive(hf: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    return {"P": sizes["P"] + POSITION_OFFSET}


def _layers() -> tuple[Tensor, ...]:
    layer = "decoder.layers.{i}."
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    return (
        *(
            tensor
            for path, source in attention.items()
            for tensor in make_linear(
                f"layers/attention/{path}", f"{layer}self_attn.{source}", "H", "ND"
            )
        ),
        *make_linear("layers/attention/out", layer + "self_attn.out_proj", "ND", "H"),
        *make_linear("layers/mlp/up", layer + "fc1", "H", "F"),
        *make_linear("layers/mlp/down", layer + "fc2", "F", "H"),
        *make_norm("layers/attention_norm", layer + "self_attn_layer_norm", "H"),
        *make_norm("layers/mlp_norm", layer + "final_layer_norm", "H"),
    )


OPT = Family(
    prefix="model.",
    trunk=(
        *make_table("embed/word", "decoder.embed_tokens", axes="VE"),
        *make_table("embed/position", "decoder.embed_positions", axes="PE"),
        *_layers(),
        *make_norm("norm", "decoder.final_layer_norm", "H"),
    ),
    heads={},
    decoder=make_decoder("lm_head.weight", "lm/table"),
    sizes={
        "V": "vocab_size", "P": "max_position_embeddings", "H": "hidden_size",
        "N": "num_attention_heads", "F": "ffn_dim", "L": "num_hidden_layers", "E": "H", "X": "E",
    },
    always=("lm",),
    classes={"lm": "ForCausalLM"},
    derive=_derive,
)  # fmt: skip
