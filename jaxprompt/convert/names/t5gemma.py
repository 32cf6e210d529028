"""T5Gemma's table of names (Zhang et al. 2025)."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.convert.hf_config import read_block, read_flag, read_size
from jaxprompt.convert.llama_fields import read_heads
from jaxprompt.convert.tensors import Family, Tensor, make_decoder, make_table


def _derive(hf: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    # The backbone refuses a decoder with other sizes.
    encoder, decoder = read_block(hf, "encoder"), read_block(hf, "decoder")
    heads, key_heads, head_dim = read_heads({**encoder, "model_type": "gemma2"})
    width = read_size(encoder, "hidden_size")
    return {
        "V": read_size(encoder, "vocab_size"), "H": width, "E": width, "X": width, "N": heads,
        "G": key_heads, "D": head_dim, "F": read_size(encoder, "intermediate_size"),
        "L": read_size(encoder, "num_hidden_layers"), "K": read_size(decoder, "num_hidden_layers"),
    }  # fmt: skip


def _traits(hf: Mapping[str, Any]) -> set[str]:
    return {"bias"} if read_flag(read_block(hf, "encoder"), "attention_bias", False) else set()


def _norm(path: str, source: str) -> Tensor:
    return Tensor(f"{path}/scale", (f"{source}.weight",), "H", ("H",))


def _layers(path: str, source: str, *, cross: bool) -> tuple[Tensor, ...]:
    layer = source + ".layers.{i}."

    def linear(name: str, source: str, into: str, out: str) -> tuple[Tensor, ...]:
        kernel, bias = f"{path}/{name}/kernel", f"{path}/{name}/bias"
        return (
            Tensor(kernel, (f"{layer}{source}.weight",), into + out, (out, into), True),
            Tensor(bias, (f"{layer}{source}.bias",), out, (out,), when="bias"),
        )

    def attention(name: str, short: str) -> tuple[Tensor, ...]:
        return (
            *linear(f"{name}/query", f"{short}_attn.q_proj", "H", "ND"),
            *linear(f"{name}/key", f"{short}_attn.k_proj", "H", "GD"),
            *linear(f"{name}/value", f"{short}_attn.v_proj", "H", "GD"),
            *linear(f"{name}/out", f"{short}_attn.o_proj", "ND", "H"),
            _norm(f"{path}/{name}_norm", f"{layer}pre_{short}_attn_layernorm"),
            _norm(f"{path}/behind_{name}_norm", f"{layer}post_{short}_attn_layernorm"),
        )

    def kernel(name: str, source: str, into: str, out: str) -> Tensor:
        return linear(name, source, into, out)[0]

    return (
        *attention("attention", "self"),
        *(attention("cross", "cross") if cross else ()),
        kernel("mlp/gate", "mlp.gate_proj", "H", "F"),
        kernel("mlp/up", "mlp.up_proj", "H", "F"),
        kernel("mlp/down", "mlp.down_proj", "F", "H"),
        _norm(f"{path}/mlp_norm", f"{layer}pre_feedforward_layernorm"),
        _norm(f"{path}/behind_mlp_norm", f"{layer}post_feedforward_layernorm"),
    )


T5GEMMA = Family(
    prefix="model.",
    trunk=(
        # First the table that a tied output table equals.
        *make_table("embed/decoder_word", "decoder.embed_tokens", axes="VE"),
        *make_table("embed/word", "encoder.embed_tokens", axes="VE"),
        *_layers("layers", "encoder", cross=False),
        _norm("norm", "encoder.norm"),
        *_layers("decoder_layers", "decoder", cross=True),
        _norm("decoder_norm", "decoder.norm"),
    ),
    heads={},
    decoder=make_decoder("lm_head.out_proj.weight", "lm/table"),
    sizes={},
    always=("lm",),
    classes={"lm": "ForConditionalGeneration"},
    derive=_derive,
    traits=_traits,
)
