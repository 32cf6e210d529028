"""Keys and values of what was read, kept for the tokens to come. Shapes never change."""

import jax
import jax.numpy as jnp

from jaxprompt.types import Cache, Prefix


def join(prefix: Prefix | None, k, v, mask) -> Prefix:
    """Joins a prefix and the keys and values of all layers. [L, B, T, N, D] x 2, bool [B, T]"""
    layers, rows, length = k.shape[:3]
    mask = jnp.broadcast_to(mask, (layers, rows, length))
    if prefix is None:
        return Prefix(k, v, mask)
    spread = lambda x: jnp.broadcast_to(x, (layers, rows, *x.shape[2:]))
    pairs = ((prefix.k.astype(k.dtype), k), (prefix.v.astype(v.dtype), v), (prefix.mask, mask))
    return Prefix(*(jnp.concatenate([spread(front), own], axis=2) for front, own in pairs))


def open_cache(prefix, k, v, mask, positions, room: int, cross: Prefix | None = None) -> Cache:
    """Starts a cache: the prefix, the tokens read, and empty columns for `room` tokens more.

    [L, B, T, N, D] x 2, bool [B, T], int [B, T] -> columns S = P + T + room
    """
    own = join(prefix, k, v, mask)
    if prefix is not None:
        outside = jnp.full(prefix.k.shape[2], -1, jnp.int32)
        where = outside if prefix.positions is None else prefix.positions
        where = jnp.broadcast_to(where, (positions.shape[0], where.shape[0]))
        positions = jnp.concatenate([where, positions], axis=1)
    grow = lambda x, axis: jnp.pad(x, [(0, room if i == axis else 0) for i in range(x.ndim)])
    own = Prefix(grow(own.k, 2), grow(own.v, 2), grow(own.mask, 2))
    return Cache(own, grow(positions, 1), cross)


def append(cache: Cache, k, v, positions, column) -> Cache:
    """Writes one token into a column. [L, B, 1, N, D] x 2, int [B], int scalar"""
    write = jax.lax.dynamic_update_slice_in_dim
    own, seen = cache.own, jnp.ones((*cache.own.mask.shape[:2], 1), bool)
    own = Prefix(
        write(own.k, k, column, 2), write(own.v, v, column, 2), write(own.mask, seen, column, 2)
    )
    return cache._replace(own=own, positions=write(cache.positions, positions[:, None], column, 1))
