"""GPT-NeoX's table of names."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.convert.hf_config import read_flag
from jaxprompt.convert.tensors import Family, Tensor, make_linear, make_norm, make_table


def _traits(hf: Mapping[str, Any]) -> set[str]:
    return {"attention_bias"} if read_flag(hf, "attention_bias", True) else set()


def _attention(path: str, source: str, into: str, out: str) -> tuple[Tensor, ...]:
    kernel, bias = make_linear(
        f"layers/attention/{path}", "layers.{i}.attention." + source, into, out
    )
    return kernel, bias._replace(when="attention_bias")


def _layers() -> tuple[Tensor, ...]:
    layer, parts = "layers.{i}.", enumerate(("query", "key", "value"))
    return (
        # The rows of each head are those of its query, its key and its value.
        *(
            tensor._replace(part=(i, 3), per_head=True)
            for i, name in parts
            for tensor in _attention(name, "query_key_value", "H", "ND")
        ),
        *_attention("out", "dense", "ND", "H"),
        *make_linear("layers/mlp/up", layer + "mlp.dense_h_to_4h", "H", "F"),
        *make_linear("layers/mlp/down", layer + "mlp.dense_4h_to_h", "F", "H"),
        *make_norm("layers/attention_norm", layer + "input_layernorm", "H"),
        *make_norm("layers/mlp_norm", layer + "post_attention_layernorm", "H"),
    )


GPT_NEOX = Family(
    prefix="gpt_neox.",
    trunk=(
        *make_table("embed/word", "embed_in", axes="VE"),
        *_layers(),
        *make_norm("norm", "final_layer_norm", "H"),
    ),
    heads={},
    # The second name is that of transformers since version 5.
    decoder=Tensor("lm/table", ("embed_out.weight", "lm_head.weight"), "VX", ("V", "X")),
    sizes={
        "V": "vocab_size", "H": "hidden_size", "N": "num_attention_heads",
        "F": "intermediate_size", "L": "num_hidden_layers", "E": "H", "X": "E",
    },
    always=("lm",),
    classes={"lm": "ForCausalLM"},
    traits=_traits,
)  # fmt: skip
