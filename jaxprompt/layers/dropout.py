"""Dropout from 16-bit random words: half the random bits of floats, rates exact to 1/65536."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn


def sample_keep_mask(shape, rate: float, key):
    """Samples which elements are kept: False with probability `rate`. -> bool `shape`

    Whether an element is kept depends on its indices, not on the size of the last two axes, so
    padding at the end changes nothing. Only JAX's default generator, threefry, supports this; any
    other samples for the shape as a whole.
    """
    *batch_dims, width = shape
    num_words = (width + 1) // 2
    if str(jax.random.key_impl(key)) == "threefry2x32":
        keys = key
        for size in reversed(batch_dims):
            keys = _fold_in_indices(keys, size)
        # With threefry, word i has the same bits in samples of any length.
        sample = functools.partial(jax.random.bits, shape=(num_words,), dtype=jnp.uint32)
        for _ in batch_dims:
            sample = jax.vmap(sample)
        bits = sample(keys)
    else:
        bits = jax.random.bits(key, (*batch_dims, num_words), jnp.uint32)
    # Low half, then high half of each word. libtpu 0.0.42.1 dies compiling for v6e where the halves
    # are stacked and reshaped instead.
    shift = 16 * (jnp.arange(width, dtype=jnp.uint32) % 2)
    halves = jnp.repeat(bits, 2, axis=-1)[..., :width] >> shift & 0xFFFF
    return halves >= round(rate * 65536)


def _fold_in_indices(keys, size: int):
    """Folds 0 to size - 1 into each key. [...] -> [size, ...]"""
    fold = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, (0, None))
    return jax.vmap(fold, (None, 0))(keys, jnp.arange(size))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def apply_keep_mask(x, keep_mask, rate: float):
    """Zeroes the elements that are not kept and scales the rest by 1 / (1 - rate)."""
    return jnp.where(keep_mask, x / (1.0 - rate), jnp.zeros_like(x))


# Automatic differentiation also stores the zeros, an array as large as x in every layer.
apply_keep_mask.defvjp(
    lambda x, keep_mask, rate: (apply_keep_mask(x, keep_mask, rate), keep_mask),
    lambda rate, keep_mask, g: (apply_keep_mask(g, keep_mask, rate), None),
)


def dropout(x, rate: float, key):
    """Zeroes each element with probability `rate` and scales the rest by 1 / (1 - rate)."""
    return apply_keep_mask(x, sample_keep_mask(x.shape, rate, key), rate)


class Dropout(nn.Module):
    """Drops elements in training; the stream is the "dropout" rng. [...] -> [...]"""

    rate: float

    @nn.compact
    def __call__(self, x, *, deterministic: bool):
        """Drops, unless deterministic."""
        if deterministic or self.rate == 0.0:
            return x
        return dropout(x, self.rate, self.make_rng("dropout"))
