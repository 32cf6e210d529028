"""Attention whose queries and keys are turned by their positions (Su et al. 2021)."""

import jax.numpy as jnp
import numpy as np

from jaxprompt.layers.attention import MultiHead
from jaxprompt.types import Seen


def make_rates(size: int, theta: float):
    """Tabulates how fast each pair of a head turns. -> float32 [D / 2]"""
    return theta ** -(np.arange(0, size, 2, dtype=np.float32) / size)


def make_turns(positions, rates, factor: float = 1.0):
    """Tabulates the turns of positions. int [B, T], [D / 2] -> cos, sin, float32 [B, T, 1, D]

    `factor` lengthens what is turned (YaRN).
    """
    # In bfloat16 positions above 256 would not be exact.
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rates, jnp.float32)
    angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def turn(x, turns):
    """Turns each pair of x[d], x[d + D / 2], in float32. [B, T, N, D] -> [B, T, N, D]"""
    cos, sin = turns
    # Halves and not neighbours are pairs: so transformers lays the projections out.
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    wide = jnp.concatenate([low, high], axis=-1) * cos
    return (wide + jnp.concatenate([-high, low], axis=-1) * sin).astype(x.dtype)


class RotaryAttention(MultiHead):
    """Attention over turned keys; those of a prefix are put in front as they are."""

    def keys(self, x, turns):
        """Projects what is attended to. [B, S, H] -> k, v [B, S, N, D]"""
        return turn(self.key(x), turns), self.value(x)

    def queries(self, x, turns):
        """Projects what attends. [B, T, H] -> [B, T, N, D]"""
        return turn(self.query(x), turns)

    def __call__(self, x, k, v, seen: Seen, turns, *, deterministic: bool):
        """Attends from x. [B, T, H], [B, S, N, D] x 2 -> [B, T, H]"""
        return self.mix(self.queries(x, turns), k, v, seen, deterministic=deterministic)

    def weigh(self, x, k, seen: Seen, turns):
        """Computes the probabilities that `__call__` mixes the values by. -> [B, N, T, S]"""
        return self.probabilities(self.queries(x, turns), k, seen)
