"""Dropout drawn from 16-bit words: half the random bits of a float draw, rates exact to 1/65536."""

import jax
import jax.numpy as jnp
from flax import linen as nn


def draw_keep(shape, rate: float, key):
    """Draws which elements stay: False with probability `rate`. -> bool `shape`"""
    *rows, last = shape
    bits = jax.random.bits(key, (*rows, (last + 1) // 2), jnp.uint32)
    halves = jnp.concatenate([bits & 0xFFFF, bits >> 16], axis=-1)[..., :last]
    return halves >= round(rate * 65536)


def thin(x, keep, rate: float):
    """Zeroes the elements that do not stay and scales the rest by 1 / (1 - rate)."""
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def drop(x, rate: float, key):
    """Zeroes each element with probability `rate` and scales the rest by 1 / (1 - rate)."""
    return thin(x, draw_keep(x.shape, rate, key), rate)


class Dropout(nn.Module):
    """Drops elements in training; the stream is the "dropout" rng. [...] -> [...]"""

    rate: float

    @nn.compact
    def __call__(self, x, *, deterministic: bool):
        """Drops, unless deterministic."""
        if deterministic or self.rate == 0.0:
            return x
        return drop(x, self.rate, self.make_rng("dropout"))
