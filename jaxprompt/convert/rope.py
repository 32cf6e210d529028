"""Reads the rotary position embeddings of a config (Su et al. 2021), scaled or not."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.convert.hf_config import read_flag, read_positive, read_size
from jaxprompt.errors import InputError, brief, nearest
from jaxprompt.layers.rotary import rotary_frequencies

# Kind of scaling -> the fields that it has beside rope_type and rope_theta.
_KINDS: dict[str, tuple[str, ...]] = {
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
}  # fmt: skip


class Turning(NamedTuple):
    """The rotary embeddings of one type of layer."""

    rates: tuple[float, ...]  # [D / 2], radians a position
    factor: float = 1.0  # of what is turned


def read_turning(
    hf: Mapping[str, Any], size: int, positions: int, *, kind: str = "", theta: float = 1e4
) -> Turning:
    """Reads the rotary embeddings of a config.

    Args:
      hf: the config.
      size: the head size.
      positions: the maximum number of positions.
      kind: the type of layer ("full_attention", "sliding_attention") if each has separate values.
      theta: the base if the config has none.

    Raises:
      InputError: if the type of scaling, or one of its fields, is not supported.
    """
    own = _find(hf, kind)
    name = own.pop("rope_type", None) or own.pop("type", None) or "default"
    own.pop("type", None)
    if not isinstance(name, str) or name not in _KINDS:
        raise InputError(f"rope_type={brief(name)} is not supported; {nearest('', _KINDS)}")
    share = own.pop("partial_rotary_factor", None)
    if share not in (None, 1, 1.0):
        raise InputError(
            f"partial_rotary_factor={brief(share)} is not supported; use a model whose factor is 1"
        )
    trained = hf.get("original_max_position_embeddings")
    # Beside one block for all layers it stands before the block's own, as transformers takes it.
    if trained is not None and name in ("llama3", "yarn") and not _is_nested(hf):
        own["original_max_position_embeddings"] = trained
    base = read_positive(own, "rope_theta", theta)
    own.pop("rope_theta", None)
    own.pop("finetuned", None)  # that such positions were trained on, which the weights tell
    more = sorted(own.keys() - _KINDS[name])
    if more:
        raise InputError(
            f"rope_parameters with rope_type={name} have {more[0]}={brief(own[more[0]])}, which "
            f"is not supported; supported: {', '.join(_KINDS[name]) or 'only rope_theta'}"
        )
    rates = rotary_frequencies(size, base)
    if name == "linear":
        rates = rates / np.float32(_factor(own))
    elif name == "dynamic":
        _factor(own)  # of texts beyond the model's positions alone, which are refused
    elif name == "llama3":
        rates = _llama3(rates, own, read_size(own, "original_max_position_embeddings", positions))
    elif name == "yarn":
        return _yarn(rates, own, base, positions)
    return Turning(tuple(map(float, rates)))


def _find(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Finds the block of a kind of layer, in today's form or in that of before."""
    whole, older = hf.get("rope_parameters"), hf.get("rope_scaling")
    for name, block in (("rope_parameters", whole), ("rope_scaling", older)):
        if block is not None and not isinstance(block, dict):
            raise InputError(f"{name}={brief(block)} must be an object; write its fields in braces")
    share = {"partial_rotary_factor": hf.get("partial_rotary_factor")}
    local = kind == "sliding_attention"
    top = {"rope_theta": hf.get("rope_local_base_freq" if local else "rope_theta")} | share
    nested = _is_nested(hf)
    if nested:
        found = (whole or {}).get(kind) if kind else None
        if not kind or not isinstance(found, dict | None):
            raise InputError(
                f"rope_parameters={brief(whole)} has one block per layer type, which this "
                "model_type does not support; give only rope_theta and rope_type"
            )
        found = dict(found or {})
    elif kind and whole:  # which transformers passes over
        raise InputError(
            f"rope_parameters={brief(whole)} does not say which layer type it is for; use "
            "{'full_attention': {...}, 'sliding_attention': {...}}"
        )
    else:
        found = dict(whole or {})
    # rope_scaling is the form before transformers 5, and never concerned local layers.
    if older and not local:
        found = found | older if nested else dict(older)
    return {key: value for key, value in (top | found).items() if value is not None}


def _is_nested(hf: Mapping[str, Any]) -> bool:
    """Returns whether each type of layer has a separate block."""
    return any(isinstance(value, dict) for value in (hf.get("rope_parameters") or {}).values())


def _factor(own: Mapping[str, Any]) -> float:
    if own.get("factor") is None:
        raise InputError("rope_parameters has no factor to scale positions by; add it")
    return read_positive(own, "factor", 1.0)


def _llama3(rates, own: Mapping[str, Any], trained: int):
    """Slows what turns less than `low` times in the trained length, and by degrees up to `high`."""
    factor = _factor(own)
    low, high = (read_positive(own, f"{end}_freq_factor", 0.0) for end in ("low", "high"))
    if not 0 < low < high:
        raise InputError(
            f"rope_parameters: low_freq_factor={low:g} must be above 0 and below "
            f"high_freq_factor={high:g}"
        )
    times = trained * rates / np.float32(2 * math.pi)
    share = np.clip((times - low) / (high - low), 0.0, 1.0)
    return ((1 - share) * rates / factor + share * rates).astype(np.float32)


def _yarn(rates, own: Mapping[str, Any], base: float, positions: int) -> Turning:
    """Slows what turns seldom, leaves what turns often, and lengthens both (Peng et al. 2024)."""
    if base <= 1:
        raise InputError(
            f"rope_type=yarn has rope_theta={base:g}, which must be above 1; give the config.json "
            "that was saved with the weights"
        )
    trained = read_size(own, "original_max_position_embeddings", positions)
    factor = read_positive(own, "factor", positions / trained)
    size = 2 * len(rates)

    def place(times: float) -> float:
        # The pair that turns so many times over the trained length: theta^(-2i/D) solved for i.
        return size * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

    low = place(read_positive(own, "beta_fast", 32.0))
    high = place(read_positive(own, "beta_slow", 1.0))
    if read_flag(own, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    # As transformers bounds it, though there are only size / 2 pairs; 0.001 avoids a division by 0.
    low, high = max(low, 0), min(high, size - 1)
    slowed = np.clip((np.arange(len(rates)) - low) / (max(high - low, 0) or 0.001), 0.0, 1.0)
    rates = rates / factor * slowed + rates * (1 - slowed)
    length = own.get("attention_factor")
    if length is None:
        # 0 is as good as none, as in transformers.
        given = [name for name in ("mscale", "mscale_all_dim") if own.get(name)]
        scales = [read_positive(own, name, 1.0) for name in given]
        length = _length(factor)
        if len(scales) == 2:
            length = _length(factor, scales[0]) / _length(factor, scales[1])
    else:
        length = read_positive(own, "attention_factor", 1.0)
    return Turning(tuple(map(float, rates.astype(np.float32))), float(length))


def _length(factor: float, scale: float = 1.0) -> float:
    # The temperature of attention, sqrt(1/t) = 0.1 ln(factor) + 1 (Peng et al. 2024).
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
