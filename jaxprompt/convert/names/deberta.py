"""DeBERTa's tables of names, for v1 and for v2 and v3 (He et al. 2021)."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.convert.hf_config import read_flag, read_size, read_word
from jaxprompt.convert.tensors import (
    Derive,
    Family,
    Tensor,
    Traits,
    make_decoder,
    make_linear,
    make_norm,
    make_table,
)
from jaxprompt.errors import InputError, brief

TERMS = ("c2p", "p2c")


def read_terms(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Reads which position terms the attention scores have, `pos_att_type`. Raises InputError."""
    terms = config.get("pos_att_type") or []
    # Released configs write "p2c|c2p".
    if isinstance(terms, str):
        terms = [word.strip() for word in terms.lower().split("|")]
    if not isinstance(terms, list | tuple) or any(term not in TERMS for term in terms):
        raise InputError(
            f"pos_att_type={brief(terms)} is not supported; give a list of {', '.join(TERMS)}"
        )
    return tuple(terms)


def norms_positions(config: Mapping[str, Any]) -> bool:
    """Reads whether the relative position embeddings are normalised. Raises InputError."""
    return read_word(config, "norm_rel_ebd", "none", ("none", "layer_norm")) == "layer_norm"


def distance_span(config: Mapping[str, Any]) -> int:
    """Reads the number of relative positions in each direction. Raises InputError."""
    for field in ("max_relative_positions", "position_buckets"):
        value = config.get(field)
        if value is not None and (type(value) is not int or not (value == -1 or value > 0)):
            raise InputError(f"{field}={brief(value)} must be above 0, or -1 if unused")
    buckets = config.get("position_buckets") or -1
    return buckets if buckets > 0 else distance_limit(config)


def distance_limit(config: Mapping[str, Any]) -> int:
    """Reads the distance from which on all positions share an embedding."""
    limit = config.get("max_relative_positions") or -1
    return limit if limit > 0 else read_size(config, "max_position_embeddings")


def conv_width(config: Mapping[str, Any]) -> int:
    """Reads the width of the convolution after the first layer, 0 = none. Raises InputError."""
    width = config.get("conv_kernel_size") or 0
    if type(width) is not int or width < 0 or (width and width % 2 == 0):
        raise InputError(f"conv_kernel_size={brief(width)} must be odd, or 0 for none")
    return width


def _num_types(config: Mapping[str, Any]) -> int:
    return read_size(config, "type_vocab_size") if config.get("type_vocab_size") else 0


def _derive(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    return {
        "S": _num_types(config),
        "W": conv_width(config),
        "R": 2 * distance_span(config) if read_flag(config, "relative_attention", False) else 0,
    }


def _traits(config: Mapping[str, Any]) -> set[str]:
    relative = read_flag(config, "relative_attention", False)
    positioned = read_flag(config, "position_biased_input", True)
    traits = {
        "legacy" if read_flag(config, "legacy", True) else "modern",
        "positioned" if positioned else "unpositioned",
        "typed" if _num_types(config) else "",
        "relative" if relative else "",
        "relative_norm" if norms_positions(config) else "",
        "convolved" if conv_width(config) else "",
    }
    # With share_att_key the projections of the contents are used for the positions too.
    has_projections = relative and not read_flag(config, "share_att_key", False)
    return traits.union(read_terms(config) if has_projections else ())


def as_v1(config: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the fields that v2 introduced: transformers ignores them in a v1 config."""
    v2_fields = ("position_buckets", "conv_kernel_size", "norm_rel_ebd", "share_att_key")
    return {name: value for name, value in config.items() if name not in v2_fields}


def _derive_v1(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    return _derive(as_v1(config), sizes)


def _traits_v1(config: Mapping[str, Any]) -> set[str]:
    return _traits(as_v1(config))


def _mlm() -> tuple[Tensor, ...]:
    """Returns the head under both of its names; the field `legacy` selects that of transformers.

    If embeddings are as wide as the model, both are the same function, so that either name is read:
    published files have the second name and no `legacy`.
    """
    tensors = []
    old, new = "cls.predictions.", "lm_predictions.lm_head."
    pairs = (
        ("dense/kernel", "transform.dense.weight", "dense.weight", "HX", ("X", "H")),
        ("dense/bias", "transform.dense.bias", "dense.bias", "X", ("X",)),
        ("norm/scale", "transform.LayerNorm.weight", "LayerNorm.weight", "X", ("X",)),
        ("norm/bias", "transform.LayerNorm.bias", "LayerNorm.bias", "X", ("X",)),
    )
    for path, old_name, new_name, axes, file_axes in pairs:
        names = {"legacy": (old + old_name,), "modern": (new + new_name,)}
        tensor = Tensor(f"mlm/{path}", (), axes, file_axes, transposed=len(axes) == 2)
        for when, elsewhere in (("legacy", "modern"), ("modern", "legacy")):
            tensors.append(
                tensor._replace(sources=names[when], when=when, elsewhere=names[elsewhere])
            )
    biases = (f"{old}decoder.bias", f"{old}bias"), (f"{new}bias",)
    for sources, others, when in ((*biases, "legacy"), (*biases[::-1], "modern")):
        tensors.append(Tensor("mlm/bias", sources, "V", ("V",), when=when, elsewhere=others))
    return tuple(tensors)


# Of a sequence classifier, whose pooler is outside of the model with the prefix.
_POOLER = tuple(t._replace(outside=True) for t in make_linear("pooler", "pooler.dense", "H", "H"))
# If the input has no positions, the released decoder adds them; transformers has no such table.
_MASK_DECODER = make_table(
    "mask_decoder", "embeddings.position_embeddings", axes="PH", when="unpositioned"
)
_LAYER = "encoder.layer.{i}."
_SELF = _LAYER + "attention.self."


def _trunk(*attention: Tensor) -> tuple[Tensor, ...]:
    return (
        *make_table("embed/word", "embeddings.word_embeddings", axes="VE"),
        *make_table(
            "embed/position", "embeddings.position_embeddings", axes="PE", when="positioned"
        ),
        *make_table("embed/type", "embeddings.token_type_embeddings", axes="SE", when="typed"),
        _kernel("embed/project", "embeddings.embed_proj", "E", "H", "projected"),
        *make_norm("embed/norm", "embeddings.LayerNorm", "H"),
        *make_table("relative", "encoder.rel_embeddings", axes="RH", when="relative"),
        *make_norm("relative/norm", "encoder.LayerNorm", "H", "relative_norm"),
        *attention,
        *make_linear("layers/attention/out", _LAYER + "attention.output.dense", "ND", "H"),
        *make_norm("layers/attention_norm", _LAYER + "attention.output.LayerNorm", "H"),
        *make_linear("layers/mlp/up", _LAYER + "intermediate.dense", "H", "F"),
        *make_linear("layers/mlp/down", _LAYER + "output.dense", "F", "H"),
        *make_norm("layers/mlp_norm", _LAYER + "output.LayerNorm", "H"),
    )


def _kernel(path: str, source: str, into: str, out: str, when: str = "") -> Tensor:
    return make_linear(path, source, into, out, when)[0]


def _family(trunk: tuple[Tensor, ...], derive: Derive, traits: Traits) -> Family:
    return Family(
        prefix="deberta.",
        trunk=trunk,
        heads={"pooler": _POOLER, "mlm": _mlm(), "mask_decoder": _MASK_DECODER},
        decoder=make_decoder("cls.predictions.decoder.weight"),
        sizes={
            "V": "vocab_size",
            "P": "max_position_embeddings",
            "H": "hidden_size",
            "N": "num_attention_heads",
            "F": "intermediate_size",
            "L": "num_hidden_layers",
            "E": "embedding_size",
            "X": "E",
        },
        classes={"mlm": "ForMaskedLM", "pooler": "ForSequenceClassification"},
        # v3 was trained by replaced-token detection: its MLM head is unused.
        unless=dict.fromkeys(("mlm", "mask_decoder"), "mask_predictions.dense.weight"),
        derive=derive,
        traits=traits,
    )


DEBERTA = _family(
    _trunk(
        # Query, key and value of each head.
        Tensor(
            "layers/attention/in_proj/kernel", (_SELF + "in_proj.weight",), "HN3D", ("N3D", "H"),
            transposed=True,
        ),
        Tensor("layers/attention/query/bias", (_SELF + "q_bias",), "ND", ("ND",)),
        Tensor("layers/attention/value/bias", (_SELF + "v_bias",), "ND", ("ND",)),
        _kernel("layers/attention/position_key", _SELF + "pos_proj", "H", "ND", "c2p"),
        *make_linear("layers/attention/position_query", _SELF + "pos_q_proj", "H", "ND", "p2c"),
    ),
    _derive_v1,
    _traits_v1,
)  # fmt: skip
DEBERTA_V2 = _family(
    _trunk(
        *make_linear("layers/attention/query", _SELF + "query_proj", "H", "ND"),
        *make_linear("layers/attention/key", _SELF + "key_proj", "H", "ND"),
        *make_linear("layers/attention/value", _SELF + "value_proj", "H", "ND"),
        *make_linear("layers/attention/position_key", _SELF + "pos_key_proj", "H", "ND", "c2p"),
        *make_linear("layers/attention/position_query", _SELF + "pos_query_proj", "H", "ND", "p2c"),
        # As in the file, [out, in, width].
        Tensor("conv/kernel", ("encoder.conv.conv.weight",), "HHW", ("H", "H", "W"),
               when="convolved"),
        Tensor("conv/bias", ("encoder.conv.conv.bias",), "H", ("H",), when="convolved"),
        *make_norm("conv/norm", "encoder.conv.LayerNorm", "H", "convolved"),
    ),
    _derive,
    _traits,
)  # fmt: skip
