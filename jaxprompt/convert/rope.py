"""Reads the rotary position embeddings of a config (Su et al. 2021), scaled or not."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.convert.hf_config import read_flag, read_positive, read_size
from jaxprompt.errors import InputError, brief, is_kind, nearest
from jaxprompt.layers.rotary import rotary_frequencies

# rope_type -> its fields besides rope_type and rope_theta.
_ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    ),
    "longrope": (
        "factor", "original_max_position_embeddings", "attention_factor", "short_factor",
        "long_factor",
    ),
}  # fmt: skip
_PHI3_POSITIONS = 4096  # original_max_position_embeddings of transformers' Phi3Config
_PHI3_NAMES = ("su", "yarn")  # of "longrope", in the first configs of Phi-3


class RotaryParams(NamedTuple):
    """The rotary embeddings of one type of layer."""

    frequencies: tuple[float, ...]  # [R / 2], radians per position; R <= D dimensions rotate
    scale: float = 1.0  # of the rotated queries and keys
    limit: int = 0  # the positions for which the frequencies are valid, 0 = all of the model's


def read_rotary(
    hf: Mapping[str, Any],
    size: int,
    positions: int,
    *,
    kind: str = "",
    theta: float = 1e4,
    part: float | None = None,
) -> RotaryParams:
    """Reads the rotary embeddings of a config.

    Args:
      hf: the config.
      size: the head size.
      positions: the maximum number of positions.
      kind: the type of layer ("full_attention", "sliding_attention") if each has separate values.
      theta: the base if the config has none.
      part: the part of a head that rotates if the config has no partial_rotary_factor; None if the
        model has no such part.

    Raises:
      InputError: if the type of scaling, or one of its fields, is not supported.
    """
    block = _find_block(hf, kind)
    name = str(block.pop("rope_type", None) or block.pop("type", None) or "default")
    block.pop("type", None)
    trained = hf.get("original_max_position_embeddings")
    if hf.get("model_type") == "phi3":
        trained = _PHI3_POSITIONS if trained is None else trained
        name = "longrope" if name in _PHI3_NAMES else name
    if name not in _ROPE_TYPES:
        raise InputError(f"rope_type={brief(name)} is not supported; {nearest('', _ROPE_TYPES)}")
    size = _read_part(block, size, part)
    # Overrides the value of a block for all layers, as in transformers.
    if (
        trained is not None
        and "original_max_position_embeddings" in _ROPE_TYPES[name]
        and (not _is_nested(hf))
    ):
        block["original_max_position_embeddings"] = trained
    base = read_positive(block, "rope_theta", theta)
    block.pop("rope_theta", None)
    block.pop("finetuned", None)  # whether the scaling was trained, which does not matter
    unsupported = sorted(block.keys() - _ROPE_TYPES[name])
    if unsupported:
        field = unsupported[0]
        raise InputError(
            f"rope_parameters with rope_type={name} have {field}={brief(block[field])}, which "
            f"is not supported; supported: {', '.join(_ROPE_TYPES[name]) or 'only rope_theta'}"
        )
    frequencies = rotary_frequencies(size, base)
    # "dynamic" only scales texts beyond the model's positions, which are refused.
    if name == "linear":
        frequencies = frequencies / np.float32(read_positive(block, "factor"))
    elif name == "llama3":
        trained = read_size(block, "original_max_position_embeddings", positions)
        frequencies = _llama3(frequencies, block, trained)
    elif name == "yarn":
        return _yarn(frequencies, block, base, positions)
    elif name == "longrope":
        return _longrope(frequencies, block, positions)
    return RotaryParams(tuple(map(float, frequencies)))


def _find_block(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns the fields for a type of layer, from the current or the earlier form."""
    current, earlier = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    if not isinstance(current, dict) or not isinstance(earlier, dict):
        raise InputError(f"rope_parameters={brief(current or earlier)} must be an object")
    is_local = kind == "sliding_attention"
    defaults = {
        "rope_theta": hf.get("rope_local_base_freq" if is_local else "rope_theta"),
        "partial_rotary_factor": hf.get("partial_rotary_factor"),
    }
    # Like transformers, ignores a block that does not say which layer type it is for.
    fields = dict((current.get(kind) if kind else current) or {})
    # rope_scaling is the form before transformers 5, and never applied to local layers.
    if earlier and not is_local:
        fields = fields | earlier if kind else dict(earlier)
    return {key: value for key, value in (defaults | fields).items() if value is not None}


def _is_nested(hf: Mapping[str, Any]) -> bool:
    """Returns whether each type of layer has a separate block."""
    return any(isinstance(value, dict) for value in (hf.get("rope_parameters") or {}).values())


def _read_part(block: dict[str, Any], size: int, part: float | None) -> int:
    """Returns the number of dimensions of a head that rotate, an even number."""
    value = block.pop("partial_rotary_factor", None)
    if part is None:
        if value not in (None, 1, 1.0):
            raise InputError(
                f"partial_rotary_factor={brief(value)} is not supported; use a model whose factor "
                "is 1"
            )
        return size
    value = part if value is None else value
    if not is_kind(value, float) or not 0 < value <= 1 or int(size * value) % 2:
        raise InputError(
            f"partial_rotary_factor={brief(value)} must be in (0, 1] and rotate an even number of "
            f"the {size} dimensions of a head; give the config.json of these weights"
        )
    return int(size * value)


def _llama3(frequencies: np.ndarray, block: Mapping[str, Any], trained: int) -> np.ndarray:
    """Divides low frequencies by the factor, and keeps high ones.

    Low are those below `low` rotations in the trained length, high those above `high`; between them
    it interpolates.
    """
    factor = read_positive(block, "factor")
    low, high = (read_positive(block, f"{end}_freq_factor") for end in ("low", "high"))
    rotations = trained * frequencies / np.float32(2 * math.pi)
    weight = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return ((1 - weight) * frequencies / factor + weight * frequencies).astype(np.float32)


def _yarn(
    frequencies: np.ndarray, block: Mapping[str, Any], base: float, positions: int
) -> RotaryParams:
    """Divides low frequencies by the factor, keeps high ones, scales both (Peng et al. 2024)."""
    trained = read_size(block, "original_max_position_embeddings", positions)
    factor = read_positive(block, "factor", positions / trained)
    size = 2 * len(frequencies)

    def pair_index(rotations: float) -> float:
        # The pair with so many rotations in the trained length: theta^(-2i/D) solved for i.
        return size * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = pair_index(read_positive(block, "beta_fast", 32.0))
    high = pair_index(read_positive(block, "beta_slow", 1.0))
    if read_flag(block, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    # As in transformers, though there are only size / 2 pairs; 0.001 avoids a division by 0.
    low, high = max(low, 0), min(high, size - 1)
    pairs = np.arange(len(frequencies))
    scaled = np.clip((pairs - low) / (max(high - low, 0) or 0.001), 0.0, 1.0)
    frequencies = frequencies / factor * scaled + frequencies * (1 - scaled)
    if block.get("attention_factor") is not None:
        scale = read_positive(block, "attention_factor")
    else:
        # 0 counts as missing, as in transformers.
        names = [name for name in ("mscale", "mscale_all_dim") if block.get(name)]
        mscales = [read_positive(block, name, 1.0) for name in names]
        scale = _attention_scale(factor)
        if len(mscales) == 2:
            scale = _attention_scale(factor, mscales[0]) / _attention_scale(factor, mscales[1])
    return RotaryParams(tuple(map(float, frequencies.astype(np.float32))), float(scale))


def _longrope(frequencies: np.ndarray, block: Mapping[str, Any], positions: int) -> RotaryParams:
    """Divides each frequency by another factor, scales both (Ding et al. 2024).

    The factors are those of texts within the trained length, `limit`. transformers changes to
    others with the length of the longest text in a batch.
    """
    trained = read_size(block, "original_max_position_embeddings", positions)
    short = block.get("short_factor")
    if (
        not isinstance(short, list)
        or len(short) != len(frequencies)
        or not all(is_kind(x, float) and x > 0 for x in short)
    ):
        raise InputError(
            f"short_factor={brief(short)} must be a list of {len(frequencies)} numbers above 0, "
            "one for each rotated pair of a head, which has hidden_size / num_attention_heads "
            "dimensions"
        )
    factor = read_positive(block, "factor", positions / trained)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    scale = read_positive(block, "attention_factor", scale)
    scaled = frequencies / np.array(short, np.float32)
    return RotaryParams(tuple(map(float, scaled)), scale, min(trained, positions))


def _attention_scale(factor: float, mscale: float = 1.0) -> float:
    # The temperature of attention, sqrt(1/t) = 0.1 ln(factor) + 1 (Peng et al. 2024).
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
