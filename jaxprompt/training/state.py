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
    zero = lambda: jnp.zeros((), jnp.int32)  # one buffer each: the state is donated
    # Plain numbers, so that checkpoints hold nothing but ordinary arrays.
    numbers = jax.random.key_data(key)
    return TrainState(zero(), trainable, tx.init(trainable), zero(), zero(), numbers)


def place_state(
    placement: Placement, trainable: Flat, tx: optax.GradientTransformation, key: jax.Array,
    *, donate: bool = False,
) -> TrainState:  # fmt: skip
    """Returns the initial state on a mesh; optimizer state is sharded like its parameters.

    With `donate` the arrays of `trainable`, which must be on the mesh, are donated: afterwards only
    their shapes can be read.
    """
    make = functools.partial(make_state, tx=tx, key=key)
    # Shapes first: where a leaf lives must be known before any is made.
    shapes = jax.eval_shape(make, trainable)
    shardings = shardings_like(placement, shapes, placement.param_shardings(trainable))
    # Made where it belongs: no device ever holds the whole of it.
    donated = (0,) if donate else ()
    return jax.jit(make, out_shardings=shardings, donate_argnums=donated)(trainable)
