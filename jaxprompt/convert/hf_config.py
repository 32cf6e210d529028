"""Reads fields of a transformers config.json, which is untrusted input.

Each reader returns the field, or `default` if it is missing or null. It raises InputError if the
field has another type or is out of range.
"""

from collections.abc import Collection, Mapping
from typing import Any

from jaxprompt.errors import InputError, brief, is_kind, nearest

_ADVICE = "give the config.json that was saved with the weights"
# Model types with a separate output table by default, as in transformers' config classes.
_UNTIED = (
    "llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "olmo2",
    "olmo3", "granite", "glm4", "gpt_neox", "gpt_oss", "eurobert",
)  # fmt: skip
LIMIT = 2**31  # of sizes and ids, which become int32
# Of layers, which are enumerated. The deepest published Transformer has as many (DeepNet, Wang et
# al. 2022).
MAX_LAYERS = 1000
_LAYER_FIELDS = (
    "num_hidden_layers", "num_layers", "n_layer", "num_decoder_layers", "num_hidden_groups",
    "inner_group_num",
)  # fmt: skip


def read_layer_types(
    hf: Mapping[str, Any], layers: int, kinds: Collection[str]
) -> list[str] | None:
    """Reads the type of each layer, one of `kinds`."""
    types = hf.get("layer_types")
    if types is None:
        return None
    fits = isinstance(types, list) and len(types) == layers
    if not fits or any(layer_type not in kinds for layer_type in types):
        raise InputError(
            f"layer_types={brief(types)} must be a list of {layers} entries ({', '.join(kinds)}), "
            "one for each of num_hidden_layers"
        )
    return types


def read_block(hf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Reads the config of a part of a model. Raises InputError if it is not a config."""
    block = hf.get(name)
    if not isinstance(block, Mapping):
        raise InputError(f"{name}={brief(block)} must be the config of the {name}; {_ADVICE}")
    return block


def read_size(hf: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """Reads a size, an integer above 0; it is required if there is no default."""
    limit = max_size(field)
    condition = f"an integer from 1 to {limit:,}"
    return _read(hf, field, default, int, condition, lambda x: 0 < x <= limit)


def max_size(field: str) -> int:
    """Returns the largest value of a size."""
    return MAX_LAYERS if field in _LAYER_FIELDS else LIMIT - 1


def read_id(hf: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """Reads a token id."""
    return _read(hf, field, default, int, "a token id", lambda x: 0 <= x < LIMIT)


def read_flag(hf: Mapping[str, Any], field: str, default: bool) -> bool:
    """Reads a boolean."""
    return _read(hf, field, default, bool, "true or false", lambda _: True)


def read_tied(hf: Mapping[str, Any], family: str) -> bool:
    """Reads tie_word_embeddings; `family` is used if model_type is missing."""
    return read_flag(hf, "tie_word_embeddings", hf.get("model_type", family) not in _UNTIED)


def read_dropout(hf: Mapping[str, Any], field: str, default: float) -> float:
    """Reads a dropout rate."""
    return _read(hf, field, default, float, "in [0, 1)", lambda x: 0 <= x < 1)


def read_positive(hf: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """Reads a number above 0; it is required if there is no default."""
    return _read(hf, field, default, float, "above 0", lambda x: x > 0)


def read_word(hf: Mapping[str, Any], field: str, default: str, choices: Collection[str]) -> str:
    """Reads one of some words. Raises InputError, which lists them, for any other."""
    word = hf.get(field)
    word = default if word is None else word
    if not isinstance(word, str) or word not in choices:
        raise InputError(f"{field}={brief(word)} is not supported; {nearest('', choices)}")
    return word


def refuse_flags(hf: Mapping[str, Any], *fields: str) -> None:
    """Raises InputError if the config sets one of these unsupported flags."""
    for field in fields:
        if read_flag(hf, field, False):
            raise InputError(f"{field}=true is not supported; use a checkpoint without it")


def _read(hf: Mapping[str, Any], field: str, default, kind: type, condition: str, is_valid) -> Any:
    value = hf.get(field)
    # transformers writes null for a missing field.
    if value is None and default is not None:
        return default
    if not is_kind(value, kind) or not is_valid(value):
        state = f"has {field}={brief(value)}" if field in hf else f"lacks {field}"
        raise InputError(f"the config {state}, which must be {condition}; {_ADVICE}")
    return value
