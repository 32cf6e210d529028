"""Attention with rotary position embeddings (Su et al. 2021)."""

import jax.numpy as jnp
import numpy as np

from jaxprompt.layers.attention import MultiHead
from jaxprompt.types import AttentionMask


def rotary_frequencies(size: int, theta: float):
    """Returns the rotation frequency of each pair of a head. -> float32 [D / 2]"""
    return theta ** -(np.arange(0, size, 2, dtype=np.float32) / size)


def make_rotations(positions, frequencies, factor: float = 1.0):
    """Returns the rotations of positions. int [B, T], [D / 2] -> cos, sin, float32 [B, T, 1, D]

    `factor` scales the rotated vectors (YaRN).
    """
    # In bfloat16 positions above 256 would not be exact.
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(x, rotations):
    """Rotates each pair of x[d], x[d + D / 2], in float32. [B, T, N, D] -> [B, T, N, D]"""
    cos, sin = rotations
    # Pairs are halves, not neighbours, as in transformers' projections.
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    wide = jnp.concatenate([low, high], axis=-1) * cos
    return (wide + jnp.concatenate([-high, low], axis=-1) * sin).astype(x.dtype)


class RotaryAttention(MultiHead):
    """Attention over rotated keys; those of a prefix are prepended without rotation."""

    def keys(self, x, rotations):
        """Projects and rotates keys. [B, S, H] -> k, v [B, S, N, D]"""
        return rotate(self.key(x), rotations), self.value(x)

    def queries(self, x, rotations):
        """Projects and rotates queries. [B, T, H] -> [B, T, N, D]"""
        return rotate(self.query(x), rotations)

    def __call__(self, x, k, v, mask: AttentionMask, rotations, *, deterministic: bool):
        """Attends from x. [B, T, H], [B, S, N, D] x 2 -> [B, T, H]"""
        return self.attend_and_project(
            self.queries(x, rotations), k, v, mask, deterministic=deterministic
        )

    def attention_weights(self, x, k, mask: AttentionMask, rotations):
        """Returns the probabilities that `__call__` weights the values with. -> [B, N, T, S]"""
        return self.probabilities(self.queries(x, rotations), k, mask)
