"""Training state of a run; frozen weights are not part of it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxprompt.parallel.sharding import Placement, shardings_like
from jaxprompt.tree import Flat


class TrainState(NamedTuple):
    """The state of one run: a pytree, donated to each step."""

    step: jax.Array  # int32 scalar, steps taken, skipped ones included
    trainable: Flat  # float32
    opt_state: Any
    skipped: jax.Array  # int32 scalar, steps skipped because they were not finite
    streak: jax.Array  # int32 scalar, how many of them in a row up to now
    key: jax.Array  # uint32 [2], of rbg [4], the run's base key; each step folds its number in


def make_state(trainable: Flat, tx: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """Returns the initial state of a run."""

    def zero() -> jax.Array:  # a buffer for each, because the state is donated
        return jnp.zeros((), jnp.int32)

    # Key data, because checkpoints only contain ordinary arrays.
    key_data = jax.random.key_data(key)
    return TrainState(zero(), trainable, tx.init(trainable), zero(), zero(), key_data)


def place_state(
    placement: Placement,
    trainable: Flat,
    tx: optax.GradientTransformation,
    key: jax.Array,
    *,
    donate: bool = False,
) -> TrainState:
    """Returns the initial state on a mesh; optimizer state is sharded like its parameters.

    With `donate` the arrays of `trainable`, which must be on the mesh, are donated: afterwards only
    their shapes can be read.
    """
    init_state = functools.partial(make_state, tx=tx, key=key)
    # Shapes first: shardings must be known before any leaf is created.
    shapes = jax.eval_shape(init_state, trainable)
    shardings = shardings_like(placement, shapes, placement.param_shardings(trainable))
    # Created in shards: no device ever holds the whole state.
    donate_argnums = (0,) if donate else ()
    return jax.jit(init_state, out_shardings=shardings, donate_argnums=donate_argnums)(trainable)
