"""Tables of names: what each of our parameters is called in Hugging Face files, one table a family.

Axes are letters (see types.py): V vocab, E embedding, H width, N heads, D head dim, F mlp, and
here also P positions, S segment types, R distance buckets, X width of the LM features, 1.
Parameters under "layers/" and "decoder_layers/" stand in the file once a layer, {i}, and are
stacked on a leading axis, L or K, the decoder's number of layers.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Tensor(NamedTuple):
    """One parameter and its origin."""

    path: str  # ours, flat
    sources: tuple[str, ...]  # names in the file: the first present is read, the last is today's
    axes: str  # ours, without L
    file_axes: tuple[str, ...]  # in the file; letters that stand together are one merged axis
    transposed: bool = False  # torch's Linear weights are [out, in]
    part: tuple[int, int] = (0, 1)  # (i, n): the i-th of n equal parts of the file's last axis
    residual: float = 0.0  # a divided residual stream divides it by that power, see `rescale`
    when: str = ""  # what a model is that has it: "projected", "gated" or "ungated"; "" = any

    @property
    def stack(self) -> str:
        """The leading axis of what the file holds once a layer: "L", "K"; "" = not stacked."""
        return {"layers": "L", "decoder_layers": "K"}.get(self.path.split("/")[0], "")


class Family(NamedTuple):
    """The names of one family; trunk and pooler names may follow `prefix`, the rest never do."""

    prefix: str
    trunk: tuple[Tensor, ...]
    heads: dict[str, tuple[Tensor, ...]]
    decoder: Tensor  # the output table; the file may hold it though it equals the word table
    sizes: dict[str, str]  # axis letter -> field of config.json, or another letter
    always: tuple[str, ...] = ()  # heads that need no tensors of their own
    bare: bool = False  # today's checkpoints leave the prefix out
    # head -> how transformers ends the name of the class that loads it, in order of precedence
    classes: Mapping[str, str] = {}


# Buffers of some versions, no weights.
IGNORED = (".position_ids", ".token_type_ids", ".attn.bias", ".attn.masked_bias")


def _table(path: str, *sources: str, axes: str, residual: float = 0.0) -> tuple[Tensor, ...]:
    names = tuple(f"{source}.weight" for source in sources)
    return (Tensor(f"{path}/table", names, axes, tuple(axes), residual=residual),)


def _norm(path: str, source: str, axis: str) -> tuple[Tensor, ...]:
    # gamma and beta are the names of checkpoints converted from TensorFlow.
    return (
        Tensor(f"{path}/scale", (f"{source}.gamma", f"{source}.weight"), axis, (axis,)),
        Tensor(f"{path}/bias", (f"{source}.beta", f"{source}.bias"), axis, (axis,)),
    )


def _linear(path: str, source: str, into: str, out: str, when: str = "") -> tuple[Tensor, ...]:
    kernel, bias = f"{path}/kernel", f"{path}/bias"
    return (
        Tensor(kernel, (f"{source}.weight",), into + out, (out, into), transposed=True, when=when),
        Tensor(bias, (f"{source}.bias",), out, (out,), when=when),
    )


def _encoder() -> tuple[Tensor, ...]:
    layer = "encoder.layer.{i}."
    return (
        *_table("embed/word", "embeddings.word_embeddings", axes="VE"),
        *_table("embed/position", "embeddings.position_embeddings", axes="PE"),
        *_table("embed/type", "embeddings.token_type_embeddings", axes="SE"),
        *_norm("embed/norm", "embeddings.LayerNorm", "E"),
        *_linear("embed/project", "embeddings_project", "E", "H", "projected"),
        *_linear("layers/attention/query", layer + "attention.self.query", "H", "ND"),
        *_linear("layers/attention/key", layer + "attention.self.key", "H", "ND"),
        *_linear("layers/attention/value", layer + "attention.self.value", "H", "ND"),
        *_linear("layers/attention/out", layer + "attention.output.dense", "ND", "H"),
        *_norm("layers/attention_norm", layer + "attention.output.LayerNorm", "H"),
        *_linear("layers/mlp/up", layer + "intermediate.dense", "H", "F"),
        *_linear("layers/mlp/down", layer + "output.dense", "F", "H"),
        *_norm("layers/mlp_norm", layer + "output.LayerNorm", "H"),
    )


_SIZES = {
    "V": "vocab_size", "P": "max_position_embeddings", "S": "type_vocab_size", "H": "hidden_size",
    "N": "num_attention_heads", "F": "intermediate_size", "L": "num_hidden_layers",
    "E": "H", "X": "E",
}  # fmt: skip
_POOLER = _linear("pooler", "pooler.dense", "H", "H")


def _mlm(dense: str, norm: str, *bias: str) -> tuple[Tensor, ...]:
    return (
        *_linear("mlm/dense", dense, "H", "X"),
        *_norm("mlm/norm", norm, "X"),
        Tensor("mlm/bias", bias, "V", ("V",)),
    )


def _decoder(source: str, path: str = "mlm/table") -> Tensor:
    return Tensor(path, (source,), "VX", ("V", "X"))


def _t5_layers(path: str, source: str, *, cross: bool) -> tuple[Tensor, ...]:
    sub = source + ".block.{i}.layer."

    def linear(
        name: str, source: str, into: str, out: str, residual: float = 0.0, when: str = ""
    ) -> Tensor:
        return Tensor(
            f"{path}/{name}/kernel", (f"{source}.weight",), into + out, (out, into), True,
            residual=residual, when=when,
        )  # fmt: skip

    def attention(name: str, at: str) -> tuple[Tensor, ...]:
        return (
            *(linear(f"{name}/{x}", f"{at}.{x[0]}", "H", "ND") for x in ("query", "key", "value")),
            linear(f"{name}/out", f"{at}.o", "ND", "H", 1.0),
        )

    def norm(name: str, at: str) -> Tensor:
        return Tensor(f"{path}/{name}/scale", (f"{at}.layer_norm.weight",), "H", ("H",))

    last = sub + ("2" if cross else "1")
    dense = last + ".DenseReluDense."
    return (
        *attention("attention", f"{sub}0.SelfAttention"),
        norm("attention_norm", f"{sub}0"),
        *(attention("cross", f"{sub}1.EncDecAttention") if cross else ()),
        *((norm("cross_norm", f"{sub}1"),) if cross else ()),
        linear("mlp/gate", f"{dense}wi_0", "H", "F", when="gated"),
        # A gated product is divided half by its linear factor and half by what follows.
        linear("mlp/up", f"{dense}wi_1", "H", "F", 0.5, "gated"),
        linear("mlp/up", f"{dense}wi", "H", "F", 0.5, "ungated"),
        linear("mlp/down", f"{dense}wo", "F", "H", 0.5),
        norm("mlp_norm", last),
    )


_T5 = Family(
    prefix="transformer.",
    trunk=(
        *_table(
            "embed/word", "shared", "encoder.embed_tokens", "decoder.embed_tokens", "shared",
            axes="VE", residual=1.0,
        ),
        *_t5_layers("layers", "encoder", cross=False),
        Tensor("norm/scale", ("encoder.final_layer_norm.weight",), "H", ("H",)),
        *_table("bias", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias", axes="RN"),
        *_t5_layers("decoder_layers", "decoder", cross=True),
        Tensor("decoder_norm/scale", ("decoder.final_layer_norm.weight",), "H", ("H",)),
        *_table(
            "decoder_bias", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            axes="RN",
        ),
    ),
    heads={},
    decoder=_decoder("lm_head.weight", "lm/table"),
    sizes={
        "V": "vocab_size", "H": "d_model", "N": "num_heads", "D": "d_kv", "F": "d_ff",
        "R": "relative_attention_num_buckets", "L": "num_layers", "K": "num_decoder_layers",
        "E": "H", "X": "E",
    },
    always=("lm",),
    bare=True,
    classes={"lm": "ForConditionalGeneration"},
)  # fmt: skip


def _gpt2_layers() -> tuple[Tensor, ...]:
    # GPT-2's linear maps are stored as [in, out]; query, key and value stand in one, side by side.
    def linear(path: str, source: str, into: str, out: str, part=(0, 1)) -> tuple[Tensor, ...]:
        name = "h.{i}." + source
        return (
            Tensor(
                f"layers/{path}/kernel", (f"{name}.weight",), into + out, (into, out), part=part
            ),
            Tensor(f"layers/{path}/bias", (f"{name}.bias",), out, (out,), part=part),
        )

    parts = enumerate(("query", "key", "value"))
    return (
        *(t for i, x in parts for t in linear(f"attention/{x}", "attn.c_attn", "H", "ND", (i, 3))),
        *linear("attention/out", "attn.c_proj", "ND", "H"),
        *linear("mlp/up", "mlp.c_fc", "H", "F"),
        *linear("mlp/down", "mlp.c_proj", "F", "H"),
        *_norm("layers/attention_norm", "h.{i}.ln_1", "H"),
        *_norm("layers/mlp_norm", "h.{i}.ln_2", "H"),
    )


_GPT2 = Family(
    prefix="transformer.",
    trunk=(
        *_table("embed/word", "wte", axes="VE"),
        *_table("embed/position", "wpe", axes="PE"),
        *_gpt2_layers(),
        *_norm("norm", "ln_f", "H"),
    ),
    heads={},
    decoder=_decoder("lm_head.weight", "lm/table"),
    sizes={
        "V": "vocab_size", "P": "n_positions", "H": "n_embd", "N": "n_head", "F": "n_inner",
        "L": "n_layer", "E": "H", "X": "E",
    },
    always=("lm",),
    classes={"lm": "LMHeadModel"},
)  # fmt: skip


_MASKED = {"mlm": "ForMaskedLM"}

# Where decoder.bias and bias are both in a file, torch adds decoder.bias.
FAMILIES = {
    "bert": Family(
        prefix="bert.",
        trunk=_encoder(),
        heads={
            "pooler": _POOLER,
            "mlm": _mlm(
                "cls.predictions.transform.dense",
                "cls.predictions.transform.LayerNorm",
                "cls.predictions.decoder.bias",
                "cls.predictions.bias",
            ),
        },
        decoder=_decoder("cls.predictions.decoder.weight"),
        sizes=_SIZES,
        classes=_MASKED,
    ),
    "roberta": Family(
        prefix="roberta.",
        trunk=_encoder(),
        heads={
            "pooler": _POOLER,
            "mlm": _mlm(
                "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder.bias", "lm_head.bias"
            ),
        },
        decoder=_decoder("lm_head.decoder.weight"),
        sizes=_SIZES,
        classes=_MASKED,
    ),
    "electra": Family(
        prefix="electra.",
        trunk=_encoder(),
        heads={
            "mlm": _mlm(
                "generator_predictions.dense",
                "generator_predictions.LayerNorm",
                "generator_lm_head.bias",
            ),
            "rtd": (
                *_linear("rtd/dense", "discriminator_predictions.dense", "H", "H"),
                *_linear("rtd/out", "discriminator_predictions.dense_prediction", "H", "1"),
            ),
        },
        decoder=_decoder("generator_lm_head.weight"),
        sizes=_SIZES | {"E": "embedding_size"},
        classes={"rtd": "ForPreTraining"} | _MASKED,
    ),
    "t5": _T5,
    "gpt2": _GPT2,
}
