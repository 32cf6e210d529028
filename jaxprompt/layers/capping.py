"""Scores and logits bounded by a tanh (Gemma Team 2024, section 2)."""

from typing import Any

import jax.numpy as jnp


def soft_cap(x, cap: float):
    """Computes cap * tanh(x / cap); with cap 0, returns x. [...] -> [...]"""
    return cap * jnp.tanh(x / cap) if cap else x


def logit_cap(backbone: Any) -> float:
    """Returns the soft cap of a backbone's logits, 0 = none."""
    return getattr(backbone.cfg, "logit_cap", 0.0)
