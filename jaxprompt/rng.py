"""Random keys derived from (seed, step, name) only, so that a resumed run samples the same."""

import zlib

import jax

# Value of `config.rng` -> JAX's name of the generator, and the number of words in one of its keys.
# threefry gives the same bits on every device and mesh, and to a run of a grid those of a single
# run. rbg is the device's own generator and faster on TPUs; its bits may change with the mesh, the
# kind of device and the version of the compiler, and under vmap they follow the first key.
GENERATORS = {"threefry": ("threefry2x32", 2), "rbg": ("rbg", 4)}


def key_for(seed: int, name: str, generator: str = "threefry") -> jax.Array:
    """Returns the base key of a seed for one use, e.g. "init" or "dropout"."""
    return for_name(jax.random.key(seed, impl=GENERATORS[generator][0]), name)


def from_key_data(key_data: jax.Array) -> jax.Array:
    """Inverts `jax.random.key_data`. Traceable."""
    (impl,) = (impl for impl, words in GENERATORS.values() if words == key_data.shape[-1])
    return jax.random.wrap_key_data(key_data, impl=impl)


def for_name(key: jax.Array, name: str) -> jax.Array:
    """Derives the key of one of several samples by its name. Traceable."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def at_step(key: jax.Array, step: jax.Array | int) -> jax.Array:
    """Derives the key of one step. Traceable."""
    return jax.random.fold_in(key, step)
