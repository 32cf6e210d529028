"""The Llama family's table of names: Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma 1 to 3."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.convert.hf_config import read_size
from jaxprompt.convert.llama_fields import read_biases, read_experts, read_heads, read_type
from jaxprompt.convert.tensors import Family, Tensor, make_decoder, make_table


def _traits(hf: Mapping[str, Any]) -> set[str]:
    name, model_type = read_type(hf)
    traits = {"sandwich" if model_type.sandwich else "plain"}
    traits.add(name if model_type.experts else "one_mlp")
    if model_type.head_norms:
        traits.add("head_norms")
    return traits | {f"{name}_bias" for name in read_biases(hf)}


def _derive(hf: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    _, key_heads, size = read_heads(hf)
    derived = {"G": key_heads, "D": size, "F": read_size(hf, read_type(hf)[1].mlp_width)}
    if experts := read_experts(hf):
        derived |= {"I": experts.num_experts, "U": 2 * derived["F"]}
    return derived


def _linear(
    path: str, source: str, into: str, out: str, bias: str, when: str = ""
) -> tuple[Tensor, ...]:
    name, kernel = "layers.{i}." + source, f"layers/{path}/kernel"
    return (
        Tensor(kernel, (f"{name}.weight",), into + out, (out, into), True, when=when),
        Tensor(f"layers/{path}/bias", (f"{name}.bias",), out, (out,), when=f"{bias}_bias"),
    )


def _norm(path: str, source: str, axis: str = "H", when: str = "") -> Tensor:
    return Tensor(f"{path}/scale", (f"{source}.weight",), axis, (axis,), when=when)


def _experts(source: str, gate: str, up: str, down: str, when: str) -> tuple[Tensor, ...]:
    """Returns the names of a router and of the experts {i} in the layers {g}."""
    router = "layers.{i}." + f"{source}.gate.weight"

    def expert(path: str, name: str, into: str, out: str) -> Tensor:
        source_name = "layers.{g}." + source + ".experts.{i}." + f"{name}.weight"
        path = f"layers/mlp/experts/{path}/kernel"
        return Tensor(path, (source_name,), into + out, (out, into), True, when=when)

    return (
        Tensor("layers/mlp/router/kernel", (router,), "HI", ("I", "H"), True, when=when),
        expert("gate", gate, "H", "F"),
        expert("up", up, "H", "F"),
        expert("down", down, "F", "H"),
    )


def _clamped_experts(source: str, when: str) -> tuple[Tensor, ...]:
    """Returns the names of a router and of experts that one tensor of a layer contains."""
    linear = _linear("mlp/router", f"{source}.router", "H", "I", when, when)

    def tensor(path: str, name: str, axes: str) -> Tensor:
        name = "layers.{i}." + f"{source}.experts.{name}"
        return Tensor(f"layers/mlp/experts/{path}", (name,), axes, tuple(axes), when=when)

    return (
        linear[0],
        linear[1]._replace(when=when),
        tensor("gate_up/kernel", "gate_up_proj", "IHU"),
        tensor("gate_up/bias", "gate_up_proj_bias", "IU"),
        tensor("down/kernel", "down_proj", "IFH"),
        tensor("down/bias", "down_proj_bias", "IH"),
        Tensor("layers/attention/sinks", ("layers.{i}.self_attn.sinks",), "N", ("N",), when=when),
    )


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
        *_linear("mlp/gate", "mlp.gate_proj", "H", "F", "mlp", "one_mlp"),
        *_linear("mlp/up", "mlp.up_proj", "H", "F", "mlp", "one_mlp"),
        *_linear("mlp/down", "mlp.down_proj", "F", "H", "mlp", "one_mlp"),
        *_experts("block_sparse_moe", "w1", "w3", "w2", "mixtral"),
        *_experts("mlp", "gate_proj", "up_proj", "down_proj", "qwen3_moe"),
        *_clamped_experts("mlp", "gpt_oss"),
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
