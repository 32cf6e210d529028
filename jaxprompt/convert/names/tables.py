"""Tables of names, one per family: our parameters and their names in transformers (tensors.py)."""

from jaxprompt.convert.names.albert import ALBERT
from jaxprompt.convert.names.bart import BART
from jaxprompt.convert.names.deberta import DEBERTA, DEBERTA_V2
from jaxprompt.convert.names.distilbert import DISTILBERT
from jaxprompt.convert.names.eurobert import EUROBERT
from jaxprompt.convert.names.glm import GLM
from jaxprompt.convert.names.gpt_neox import GPT_NEOX
from jaxprompt.convert.names.llama import LLAMA
from jaxprompt.convert.names.modernbert import MODERNBERT
from jaxprompt.convert.names.mpnet import MPNET
from jaxprompt.convert.names.opt import OPT
from jaxprompt.convert.names.t5gemma import T5GEMMA
from jaxprompt.convert.tensors import (
    Family,
    Tensor,
    make_decoder,
    make_linear,
    make_mlm,
    make_norm,
    make_table,
)


def _encoder() -> tuple[Tensor, ...]:
    layer = "encoder.layer.{i}."
    return (
        *make_table("embed/word", "embeddings.word_embeddings", axes="VE"),
        *make_table("embed/position", "embeddings.position_embeddings", axes="PE"),
        *make_table("embed/type", "embeddings.token_type_embeddings", axes="SE"),
        *make_norm("embed/norm", "embeddings.LayerNorm", "E"),
        *make_linear("embed/project", "embeddings_project", "E", "H", "projected"),
        *make_linear("layers/attention/query", layer + "attention.self.query", "H", "ND"),
        *make_linear("layers/attention/key", layer + "attention.self.key", "H", "ND"),
        *make_linear("layers/attention/value", layer + "attention.self.value", "H", "ND"),
        *make_linear("layers/attention/out", layer + "attention.output.dense", "ND", "H"),
        *make_norm("layers/attention_norm", layer + "attention.output.LayerNorm", "H"),
        *make_linear("layers/mlp/up", layer + "intermediate.dense", "H", "F"),
        *make_linear("layers/mlp/down", layer + "output.dense", "F", "H"),
        *make_norm("layers/mlp_norm", layer + "output.LayerNorm", "H"),
    )


def _pre_norm_encoder() -> tuple[Tensor, ...]:
    """Returns the names of a RoBERTa with the norms before the blocks."""
    layer = "encoder.layer.{i}."
    norms = ("embed/norm/", "layers/attention_norm/", "layers/mlp_norm/", "embed/project/")
    return (
        *(tensor for tensor in _encoder() if not tensor.path.startswith(norms)),
        *make_norm("layers/attention_norm", layer + "attention.self_attn_layer_norm", "H"),
        *make_norm("layers/mlp_norm", layer + "LayerNorm", "H"),
        *make_norm("norm", "encoder.LayerNorm", "H"),
    )


_SIZES = {
    "V": "vocab_size", "P": "max_position_embeddings", "S": "type_vocab_size", "H": "hidden_size",
    "N": "num_attention_heads", "F": "intermediate_size", "L": "num_hidden_layers",
    "E": "H", "X": "E",
}  # fmt: skip
_POOLER = make_linear("pooler", "pooler.dense", "H", "H")


def _t5_layers(path: str, source: str, *, cross: bool) -> tuple[Tensor, ...]:
    sub = source + ".block.{i}.layer."

    def linear(
        name: str, source: str, into: str, out: str, residual: float = 0.0, when: str = ""
    ) -> Tensor:
        return Tensor(
            f"{path}/{name}/kernel",
            (f"{source}.weight",),
            into + out,
            (out, into),
            True,
            residual=residual,
            when=when,
        )

    def attention(name: str, at: str) -> tuple[Tensor, ...]:
        return (
            *(linear(f"{name}/{x}", f"{at}.{x[0]}", "H", "ND") for x in ("query", "key", "value")),
            # It writes into the residual stream, which `rescale` divides.
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
        # A gated product is divided half in its linear factor and half in the next layer.
        linear("mlp/up", f"{dense}wi_1", "H", "F", 0.5, "gated"),
        # relu(c x) = c relu(x), so that half can be divided before and half after it.
        linear("mlp/up", f"{dense}wi", "H", "F", 0.5, "ungated"),
        linear("mlp/down", f"{dense}wo", "F", "H", 0.5),
        norm("mlp_norm", last),
    )


_T5 = Family(
    prefix="transformer.",
    trunk=(
        *make_table(
            # `shared` twice: the first name that exists is read, the last is written.
            "embed/word", "shared", "encoder.embed_tokens", "decoder.embed_tokens", "shared",
            axes="VE", residual=1.0,
        ),
        *_t5_layers("layers", "encoder", cross=False),
        Tensor("norm/scale", ("encoder.final_layer_norm.weight",), "H", ("H",)),
        *make_table(
            # The biases are in the first layer of T5, and all layers use them.
            "bias", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias", axes="RN"
        ),
        *_t5_layers("decoder_layers", "decoder", cross=True),
        Tensor("decoder_norm/scale", ("decoder.final_layer_norm.weight",), "H", ("H",)),
        *make_table(
            "decoder_bias", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            axes="RN",
        ),
    ),
    heads={},
    decoder=make_decoder("lm_head.weight", "lm/table"),
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
    # GPT-2's linear layers are stored as [in, out]; query, key and value are concatenated.
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
        *make_norm("layers/attention_norm", "h.{i}.ln_1", "H"),
        *make_norm("layers/mlp_norm", "h.{i}.ln_2", "H"),
    )


_GPT2 = Family(
    prefix="transformer.",
    trunk=(
        *make_table("embed/word", "wte", axes="VE"),
        *make_table("embed/position", "wpe", axes="PE"),
        *_gpt2_layers(),
        *make_norm("norm", "ln_f", "H"),
    ),
    heads={},
    decoder=make_decoder("lm_head.weight", "lm/table"),
    sizes={
        "V": "vocab_size", "P": "n_positions", "H": "n_embd", "N": "n_head", "F": "n_inner",
        "L": "n_layer", "E": "H", "X": "E",
    },
    always=("lm",),
    classes={"lm": "LMHeadModel"},
)  # fmt: skip


_MASKED = {"mlm": "ForMaskedLM"}

# Where decoder.bias and bias are both in a file, torch adds decoder.bias.
_ROBERTA = Family(
    prefix="roberta.",
    trunk=_encoder(),
    heads={
        "pooler": _POOLER,
        "mlm": make_mlm(
            "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder.bias", "lm_head.bias"
        ),
    },
    decoder=make_decoder("lm_head.decoder.weight"),
    sizes=_SIZES,
    classes=_MASKED,
)
FAMILIES = {
    "bert": Family(
        prefix="bert.",
        trunk=_encoder(),
        heads={
            "pooler": _POOLER,
            "mlm": make_mlm(
                "cls.predictions.transform.dense",
                "cls.predictions.transform.LayerNorm",
                "cls.predictions.decoder.bias",
                "cls.predictions.bias",
            ),
        },
        decoder=make_decoder("cls.predictions.decoder.weight"),
        sizes=_SIZES,
        classes=_MASKED,
    ),
    "roberta": _ROBERTA,
    "xlm_roberta_xl": _ROBERTA._replace(trunk=_pre_norm_encoder()),
    "distilbert": DISTILBERT,
    "electra": Family(
        prefix="electra.",
        trunk=_encoder(),
        heads={
            "mlm": make_mlm(
                "generator_predictions.dense",
                "generator_predictions.LayerNorm",
                "generator_lm_head.bias",
            ),
            "rtd": (
                *make_linear("rtd/dense", "discriminator_predictions.dense", "H", "H"),
                *make_linear("rtd/out", "discriminator_predictions.dense_prediction", "H", "1"),
            ),
        },
        decoder=make_decoder("generator_lm_head.weight"),
        sizes=_SIZES | {"E": "embedding_size"},
        classes={"rtd": "ForPreTraining"} | _MASKED,
    ),
    "albert": ALBERT,
    "deberta": DEBERTA,
    "deberta_v2": DEBERTA_V2,
    "modernbert": MODERNBERT,
    "mpnet": MPNET,
    "eurobert": EUROBERT,
    "t5": _T5,
    "t5gemma": T5GEMMA,
    "bart": BART,
    "gpt2": _GPT2,
    "glm": GLM,
    "llama": LLAMA,
    "gpt_neox": GPT_NEOX,
    "opt": OPT,
}
