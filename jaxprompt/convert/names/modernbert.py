"""ModernBERT's table of names (Warner et al. 2024)."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.convert.hf_config import read_flag
from jaxprompt.convert.tensors import (
    Family,
    Tensor,
    make_decoder,
    make_linear,
    make_norm,
    make_table,
)

# Fields for the biases of each kind of layer, and their defaults.
BIASES = {
    "norm_bias": False, "attention_bias": False, "mlp_bias": False, "classifier_bias": False,
    "decoder_bias": True,
}  # fmt: skip


def read_biases(config: Mapping[str, Any]) -> set[str]:
    """Lists the kinds of linear layer that have biases. Raises InputError."""
    return {name for name, default in BIASES.items() if read_flag(config, name, default)}


def _derive(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    # The first layer has no norm before its attention, as the embeddings are normalised.
    return {"J": sizes["L"] - 1}


def _norm(path: str, source: str) -> tuple[Tensor, ...]:
    scale, bias = make_norm(path, source, "H")
    return scale, bias._replace(when="norm_bias")


def _part(path: str, source: str, out: str, part: tuple[int, int], when: str):
    kernel, bias = make_linear(f"layers/{path}", "layers.{i}." + source, "H", out)
    return kernel._replace(part=part), bias._replace(part=part, when=when)


def _out(path: str, source: str, into: str, when: str) -> tuple[Tensor, ...]:
    kernel, bias = make_linear(path, source, into, "H")
    return kernel, bias._replace(when=when)


def _layers() -> tuple[Tensor, ...]:
    layer, parts = "layers.{i}.", enumerate(("query", "key", "value"))
    attention = [
        tensor
        for i, name in parts
        for tensor in _part(f"attention/{name}", "attn.Wqkv", "ND", (i, 3), "attention_bias")
    ]
    return (
        *attention,
        *_out("layers/attention/out", layer + "attn.Wo", "ND", "attention_bias"),
        *_norm("later_layers/attention_norm", layer + "attn_norm"),
        # The activation is applied to the first half.
        *_part("mlp/gate", "mlp.Wi", "F", (0, 2), "mlp_bias"),
        *_part("mlp/up", "mlp.Wi", "F", (1, 2), "mlp_bias"),
        *_out("layers/mlp/down", layer + "mlp.Wo", "F", "mlp_bias"),
        *_norm("layers/mlp_norm", layer + "mlp_norm"),
    )


MODERNBERT = Family(
    prefix="model.",
    trunk=(
        *make_table("embed/word", "embeddings.tok_embeddings", axes="VE"),
        *_norm("embed/norm", "embeddings.norm"),
        *_layers(),
        *_norm("norm", "final_norm"),
    ),
    heads={
        "mlm": (
            *_out("mlm/dense", "head.dense", "H", "classifier_bias"),
            *_norm("mlm/norm", "head.norm"),
            Tensor("mlm/bias", ("decoder.bias",), "V", ("V",), when="decoder_bias"),
        ),
    },
    decoder=make_decoder("decoder.weight"),
    sizes={
        "V": "vocab_size", "H": "hidden_size", "N": "num_attention_heads",
        "F": "intermediate_size", "L": "num_hidden_layers", "E": "H", "X": "E",
    },
    classes={"mlm": "ForMaskedLM"},
    # A classifier's head has the names of the masked-LM head.
    unless={"mlm": "classifier.weight"},
    derive=_derive,
    traits=read_biases,
)  # fmt: skip
