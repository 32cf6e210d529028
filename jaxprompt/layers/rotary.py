"""Attention with rotary position embeddings (Su et al. 2021)."""

import jax.numpy as jnp
import numpy as np

from jaxprompt.layers.attention import MultiHead
from jaxprompt.types import AttentionMask


def rotary_frequencies(size: int, theta: float):
    """Returns the rotation frequency of each pair of a head. -> float32 [D / 2]"""
    return theta ** -(np.arange(0, size, 2, dtype=np.float32) / size)


def make_rotations(positions, frequencies, factor: float = 1.0, *, interleaved: bool = False):
    """Returns the rotations of positions. int [B, T], [R / 2] -> cos, sin, float32 [B, T, 1, R]

    `factor` scales the rotated vectors (YaRN). `interleaved`: see `rotate`.
    """
    # In bfloat16 positions above 256 would not be exact.
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    if interleaved:
        angles = jnp.repeat(angles, 2, axis=-1)[:, :, None]
    else:
        angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(x, rotations, *, interleaved: bool = False):
    """Rotates the first R dimensions, in float32. [B, T, N, D] -> [B, T, N, D]

    A pair is x[d], x[d + R / 2], or with `interleaved` x[2 d], x[2 d + 1].
    """
    cos, sin = rotations
    size = cos.shape[-1]
    if size < x.shape[-1]:
        rotated = rotate(x[..., :size], rotations, interleaved=interleaved)
        return jnp.concatenate([rotated, x[..., size:]], axis=-1)
    if interleaved:
        wide = x.astype(jnp.float32)
        pairs = wide.reshape(*wide.shape[:-1], -1, 2)
        turned = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(wide.shape)
        return (wide * cos + turned * sin).astype(x.dtype)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    wide = jnp.concatenate([low, high], axis=-1) * cos
    return (wide + jnp.concatenate([-high, low], axis=-1) * sin).astype(x.dtype)


class RotaryAttention(MultiHead):
    """Attention over rotated keys; those of a prefix are prepended without rotation."""

    interleaved: bool = False  # see `rotate`

    def keys(self, x, rotations):
        """Projects and rotates keys. [B, S, H] -> k, v [B, S, N, D]"""
        return rotate(self.key(x), rotations, interleaved=self.interleaved), self.value(x)

    def queries(self, x, rotations):
        """Projects and rotates queries. [B, T, H] -> [B, T, N, D]"""
        return rotate(self.query(x), rotations, interleaved=self.interleaved)

    def __call__(self, x, k, v, mask: AttentionMask, rotations, *, deterministic: bool):
        """Attends from x. [B, T, H], [B, S, N, D] x 2 -> [B, T, H]"""
        return self.attend_and_project(
            self.queries(x, rotations), k, v, mask, deterministic=deterministic
        )

    def attention_weights(self, x, k, mask: AttentionMask, rotations):
        """Returns the probabilities that `__call__` weights the values with. -> [B, N, T, S]"""
        return self.probabilities(self.queries(x, rotations), k, mask)
