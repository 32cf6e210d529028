"""Tables of names: what each of our parameters is called in Hugging Face files, one table a family.

Axes are letters (see types.py): V vocab, E embedding, H width, N heads, D head dim, F mlp, and
here also P positions, S segment types, X width of the MLM features, 1. Parameters under "layers/"
stand in the file once a layer, {i}, and are stacked on a leading axis L.
"""

from typing import NamedTuple


class Tensor(NamedTuple):
    """One parameter and its origin."""

    path: str  # ours, flat
    sources: tuple[str, ...]  # names in the file: the first present is read, the last is today's
    axes: str  # ours, without L
    file_axes: tuple[str, ...]  # in the file; letters that stand together are one merged axis
    transposed: bool = False  # torch's Linear weights are [out, in]


class Family(NamedTuple):
    """The names of one family; trunk and pooler names may follow `prefix`, the rest never do."""

    prefix: str
    trunk: tuple[Tensor, ...]
    heads: dict[str, tuple[Tensor, ...]]
    decoder: Tensor  # the output table; the file may hold it though it equals the word table


# Buffers of some versions, no weights.
IGNORED = (".position_ids", ".token_type_ids")


def _table(path: str, source: str, axes: str) -> tuple[Tensor, ...]:
    return (Tensor(f"{path}/table", (f"{source}.weight",), axes, tuple(axes)),)


def _norm(path: str, source: str, axis: str) -> tuple[Tensor, ...]:
    # gamma and beta are the names of checkpoints converted from TensorFlow.
    return (
        Tensor(f"{path}/scale", (f"{source}.gamma", f"{source}.weight"), axis, (axis,)),
        Tensor(f"{path}/bias", (f"{source}.beta", f"{source}.bias"), axis, (axis,)),
    )


def _linear(path: str, source: str, into: str, out: str) -> tuple[Tensor, ...]:
    return (
        Tensor(f"{path}/kernel", (f"{source}.weight",), into + out, (out, into), transposed=True),
        Tensor(f"{path}/bias", (f"{source}.bias",), out, (out,)),
    )


def _encoder(embed_to_hidden: bool = False) -> tuple[Tensor, ...]:
    layer = "encoder.layer.{i}."
    project = _linear("embed/project", "embeddings_project", "E", "H") if embed_to_hidden else ()
    return (
        *_table("embed/word", "embeddings.word_embeddings", "VE"),
        *_table("embed/position", "embeddings.position_embeddings", "PE"),
        *_table("embed/type", "embeddings.token_type_embeddings", "SE"),
        *_norm("embed/norm", "embeddings.LayerNorm", "E"),
        *project,
        *_linear("layers/attention/query", layer + "attention.self.query", "H", "ND"),
        *_linear("layers/attention/key", layer + "attention.self.key", "H", "ND"),
        *_linear("layers/attention/value", layer + "attention.self.value", "H", "ND"),
        *_linear("layers/attention/out", layer + "attention.output.dense", "ND", "H"),
        *_norm("layers/attention_norm", layer + "attention.output.LayerNorm", "H"),
        *_linear("layers/mlp/up", layer + "intermediate.dense", "H", "F"),
        *_linear("layers/mlp/down", layer + "output.dense", "F", "H"),
        *_norm("layers/mlp_norm", layer + "output.LayerNorm", "H"),
    )


_POOLER = _linear("pooler", "pooler.dense", "H", "H")


def _mlm(dense: str, norm: str, *bias: str) -> tuple[Tensor, ...]:
    return (
        *_linear("mlm/dense", dense, "H", "X"),
        *_norm("mlm/norm", norm, "X"),
        Tensor("mlm/bias", bias, "V", ("V",)),
    )


def _decoder(source: str) -> Tensor:
    return Tensor("mlm/table", (source,), "VX", ("V", "X"))


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
    ),
    "electra": Family(
        prefix="electra.",
        trunk=_encoder(embed_to_hidden=True),
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
    ),
}
