"""Random keys by folding (seed, step, name), and nothing else: a resumed run draws the same."""

import zlib

import jax

# What `config.rng` calls a generator -> JAX's name, and the number of words in one of its keys.
# threefry gives the same bits on every device and mesh, and to a run of a grid those that it has
# alone. rbg is the device's own generator and cheaper on TPUs; its bits may change with the mesh,
# the kind of device and the version of the compiler, and under vmap they follow the first key.
GENERATORS = {"threefry": ("threefry2x32", 2), "rbg": ("rbg", 4)}


def key_for(seed: int, name: str, generator: str = "threefry") -> jax.Array:
    """Makes the base key of one use ("init", "dropout") of a seed."""
    return for_name(jax.random.key(seed, impl=GENERATORS[generator][0]), name)


def from_numbers(numbers: jax.Array) -> jax.Array:
    """Makes the key of the numbers that `jax.random.key_data` gave. Traceable."""
    (impl,) = (impl for impl, words in GENERATORS.values() if words == numbers.shape[-1])
    return jax.random.wrap_key_data(numbers, impl=impl)


def for_name(key: jax.Array, name: str) -> jax.Array:
    """Derives the key of one of several draws. Traceable."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def at_step(key: jax.Array, step: jax.Array | int) -> jax.Array:
    """Derives the key of one step. Traceable."""
    return jax.random.fold_in(key, step)
