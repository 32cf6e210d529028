"""Random keys by folding (seed, step, name), and nothing else: a resumed run draws the same."""

import zlib

import jax


def key_for(seed: int, name: str) -> jax.Array:
    """Makes the base key of one use ("init", "dropout") of a seed."""
    return for_name(jax.random.key(seed), name)


def for_name(key: jax.Array, name: str) -> jax.Array:
    """Derives the key of one of several draws. Traceable."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def at_step(key: jax.Array, step: jax.Array | int) -> jax.Array:
    """Derives the key of one step. Traceable."""
    return jax.random.fold_in(key, step)
