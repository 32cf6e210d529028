"""The Llama family's table of names, for all model types of llama_fields.py."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.convert.hf_config import read_size
from jaxprompt.convert.llama_fields import read_biases, read_experts, read_heads, read_type
from jaxprompt.convert.tensors import Family, Tensor, make_decoder, make_table


def _traits(hf: Mapping[str, Any]) -> set[str]:
    name, model_type = read_type(hf)
    norms, is_glm = model_type.norms, model_type.glm_names
    traits = {f"{name}_bias" for name in read_biases(hf)}
    traits.add("fused_qkv" if "qkv" in model_type.fused else "separate_qkv")
    traits.add(name if model_type.experts else "one_mlp")
    if not model_type.experts:
        traits.add("fused_gate_up" if "gate_up" in model_type.fused else "separate_gate_up")
    if model_type.head_norms:
        traits.add(f"{model_type.head_norms}_norms")
    if norms != "post":
        traits.add("input_norm")
    if norms in ("pre", "sandwich"):
        traits.add("feedforward_norm" if norms == "sandwich" and not is_glm else "mlp_norm")
    if norms in ("post", "sandwich"):
        traits.add("glm_post_norms" if is_glm else "post_norms")
    return traits


def _derive(hf: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    heads, key_heads, size = read_heads(hf)
    derived = {"G": key_heads, "D": size, "A": heads * size, "C": key_heads * size}
    derived["F"] = read_size(hf, read_type(hf)[1].mlp_width)
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


def _fused(source: str, paths: Mapping[str, str], when: str) -> tuple[Tensor, ...]:
    """Returns the names of matrices that the file concatenates: path -> its output axes."""
    return tuple(
        Tensor(
            f"layers/{path}/kernel",
            ("layers.{i}." + source + ".weight",),
            "H" + out,
            (out, "H"),
            True,
            part=(i, len(paths)),
            parts=tuple(paths.values()),
            when=when,
        )
        for i, (path, out) in enumerate(paths.items())
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
        *_linear("attention/query", "self_attn.q_proj", "H", "ND", "qkv", "separate_qkv"),
        *_linear("attention/key", "self_attn.k_proj", "H", "GD", "qkv", "separate_qkv"),
        *_linear("attention/value", "self_attn.v_proj", "H", "GD", "qkv", "separate_qkv"),
        *_fused(
            "self_attn.qkv_proj",
            {"attention/query": "ND", "attention/key": "GD", "attention/value": "GD"},
            "fused_qkv",
        ),
        *_linear("attention/out", "self_attn.o_proj", "ND", "H", "out"),
        norm("attention/query_norm", "self_attn.q_norm", axis="D", when="head_norms"),
        norm("attention/key_norm", "self_attn.k_norm", axis="D", when="head_norms"),
        norm("attention/query_norm", "self_attn.q_norm", axis="A", when="all_norms"),
        norm("attention/key_norm", "self_attn.k_norm", axis="C", when="all_norms"),
        norm("attention_norm", "input_layernorm", when="input_norm"),
        # "post_attention" means before the MLP in some model types, after the attention in others.
        norm("mlp_norm", "post_attention_layernorm", when="mlp_norm"),
        norm("behind_attention_norm", "post_attention_layernorm", when="post_norms"),
        norm("mlp_norm", "pre_feedforward_layernorm", when="feedforward_norm"),
        norm("behind_mlp_norm", "post_feedforward_layernorm", when="post_norms"),
        norm("behind_attention_norm", "post_self_attn_layernorm", when="glm_post_norms"),
        norm("behind_mlp_norm", "post_mlp_layernorm", when="glm_post_norms"),
        *_linear("mlp/gate", "mlp.gate_proj", "H", "F", "mlp", "separate_gate_up"),
        *_linear("mlp/up", "mlp.up_proj", "H", "F", "mlp", "separate_gate_up"),
        *_fused("mlp.gate_up_proj", {"mlp/gate": "F", "mlp/up": "F"}, "fused_gate_up"),
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
