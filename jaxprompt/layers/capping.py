"""Scores and logits bounded by a tanh (Gemma Team 2024, section 2)."""

from typing import Any

import jax.numpy as jnp


def soft_cap(x, cap: float):
    """Computes cap * tanh(x / cap); a cap of 0 leaves x as it is. [...] -> [...]"""
    return cap * jnp.tanh(x / cap) if cap else x


def logit_cap(backbone: Any) -> float:
    """Tells by what a backbone bounds its logits, 0 = by nothing."""
    return getattr(backbone.cfg, "logit_cap", 0.0)
