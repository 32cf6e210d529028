"""BART's table of names (Lewis et al. 2020)."""

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


def _derive(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    # The tables have two rows before that of position 0.
    return {"P": sizes["P"] + 2}


def _layers(path: str, source: str, **attentions: str) -> tuple[Tensor, ...]:
    layer = source + ".layers.{i}."
    tensors: tuple[Tensor, ...] = ()
    for name, block in attentions.items():
        for part in ("query", "key", "value"):
            projection = f"{layer}{block}.{part[0]}_proj"
            tensors += make_linear(f"{path}/{name}/{part}", projection, "H", "ND")
        tensors += make_linear(f"{path}/{name}/out", f"{layer}{block}.out_proj", "ND", "H")
        tensors += make_norm(f"{path}/{name}_norm", f"{layer}{block}_layer_norm", "H")
    return (
        *tensors,
        *make_linear(f"{path}/mlp/up", layer + "fc1", "H", "F"),
        *make_linear(f"{path}/mlp/down", layer + "fc2", "F", "H"),
        *make_norm(f"{path}/mlp_norm", layer + "final_layer_norm", "H"),
    )


BART = Family(
    prefix="model.",
    trunk=(
        *make_table(
            # `shared` twice: the first name that exists is read, the last is written.
            "embed/word", "shared", "encoder.embed_tokens", "decoder.embed_tokens", "shared",
            axes="VE",
        ),
        *make_table("embed/position", "encoder.embed_positions", axes="PE"),
        *make_table("embed/decoder_position", "decoder.embed_positions", axes="PE"),
        *make_norm("embed/norm", "encoder.layernorm_embedding", "E"),
        *make_norm("embed/decoder_norm", "decoder.layernorm_embedding", "E"),
        *_layers("layers", "encoder", attention="self_attn"),
        *_layers("decoder_layers", "decoder", attention="self_attn", cross="encoder_attn"),
    ),
    # A checkpoint without the language model's class has no bias.
    heads={"lm_bias": (Tensor("lm_bias", ("final_logits_bias",), "1V", ("1", "V"), outside=True),)},
    decoder=make_decoder("lm_head.weight", "lm/table"),
    sizes={
        "V": "vocab_size", "P": "max_position_embeddings", "H": "d_model",
        "N": "encoder_attention_heads", "F": "encoder_ffn_dim", "L": "encoder_layers",
        "K": "decoder_layers", "E": "H", "X": "E",
    },
    always=("lm",),
    classes={"lm": "ForConditionalGeneration"},
    derive=_derive,
)  # fmt: skip
