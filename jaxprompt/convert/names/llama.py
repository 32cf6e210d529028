"""The Llama family's table of names: Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.convert.llama_fields import read_biases, read_heads, read_type
from jaxprompt.convert.tensors import Family, Tensor, make_decoder, make_table


def _traits(hf: Mapping[str, Any]) -> set[str]:
    model_type = read_type(hf)[1]
    traits = {"sandwich" if model_type.sandwich else "plain"}
    if model_type.head_norms:
        traits.add("head_norms")
    return traits | {f"{name}_bias" for name in read_biases(hf)}


def _derive(hf: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    _, key_heads, size = read_heads(hf)
    return {"G": key_heads, "D": size}


def _linear(path: str, source: str, into: str, out: str, bias: str) -> tuple[Tensor, ...]:
    name = "layers.{i}." + source
    return (
        Tensor(f"layers/{path}/kernel", (f"{name}.weight",), into + out, (out, into), True),
        Tensor(f"layers/{path}/bias", (f"{name}.bias",), out, (out,), when=f"{bias}_bias"),
    )


def _norm(path: str, source: str, axis: str = "H", when: str = "") -> Tensor:
    return Tensor(f"{path}/scale", (f"{source}.weight",), axis, (axis,), when=when)


def _layers() -> tuple[Tensor, ...]:
    layer = "layers.{i}."

    def norm(path: str, source: str, **options: str) -> Tensor:
        return _norm(f"layers/{path}", layer + source, **options)

    return (
        *_linear("attention/query", "self_attn.q_proj", "H", "ND", "qkv"),
        *_linear("attention/key", "self_attn.k_proj", "H", "GD", "qkv"),
        *_linear("attention/value", "self_attn.v_proj", "H", "GD", "qkv"),
        *_linear("attention/out", "self_attn.o_proj", "ND", "H", "out"),
        norm("attention/query_norm", "self_attn.q_norm", axis="D", when="head_norms"),
        norm("attention/key_norm", "self_attn.k_norm", axis="D", when="head_norms"),
        norm("attention_norm", "input_layernorm"),
        # With a sandwich this name is the norm after the attention.
        norm("mlp_norm", "post_attention_layernorm", when="plain"),
        norm("behind_attention_norm", "post_attention_layernorm", when="sandwich"),
        norm("mlp_norm", "pre_feedforward_layernorm", when="sandwich"),
        norm("behind_mlp_norm", "post_feedforward_layernorm", when="sandwich"),
        *_linear("mlp/gate", "mlp.gate_proj", "H", "F", "mlp"),
        *_linear("mlp/up", "mlp.up_proj", "H", "F", "mlp"),
        *_linear("mlp/down", "mlp.down_proj", "F", "H", "mlp"),
    )


LLAMA = Family(
    prefix="model.",
    trunk=(
        *make_table("embed/word", "embed_tokens", axes="VE"),
        *_layers(),
        _norm("norm", "norm"),
    ),
    heads={},
    decoder=make_decoder("lm_head.weight", "lm/table"),
    sizes={
        "V": "vocab_size", "H": "hidden_size", "N": "num_attention_heads",
        "F": "intermediate_size", "L": "num_hidden_layers", "E": "H", "X": "E",
    },
    always=("lm",),
    classes={"lm": "ForCausalLM"},
    derive=_derive,
    traits=_traits,
)  # fmt: skip
