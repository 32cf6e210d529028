"""Keys and values of earlier tokens, cached for later ones. Shapes never change.

Each layer has separate arrays, with heads before columns: a loop writes them in place, and no step
slices a stack or transposes.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxprompt.layers.attention import prepend_prefix
from jaxprompt.parallel.sharding import current_target
from jaxprompt.types import AttentionMask, Cache, LayerCache, Prefix


class StackedLayers(NamedTuple):
    """Stacked layers that a loop over tokens reads in place."""

    tree: Any  # leaves [L, ...]
    length: int  # L


def unstack(tree, length: int) -> tuple:
    """Splits a stack. Leaves [L, ...] -> L trees of leaves [...]"""
    return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(length))


def copies_layers(platform: str) -> bool:
    """Returns whether a loop over tokens reads copies of the layers in addition to the stack.

    The compiler for TPUs reads a slice of the stack inside the product. Those for CPUs and GPUs
    would copy it for every token.
    """
    return platform != "tpu"


def decoding_layers(tree, length: int) -> tuple | StackedLayers:
    """Returns the layers for a loop over tokens with `iterate_layers`."""
    return (
        unstack(tree, length)
        if copies_layers(current_target().platform)
        else StackedLayers(tree, length)
    )


def iterate_layers(layers: tuple | StackedLayers, column) -> Iterable[Any]:
    """Returns the weights of each layer, inside a loop that counts `column`, int scalar >= 0."""
    if not isinstance(layers, StackedLayers):
        return layers
    # 0 at each turn, which the compiler does not know: else it would slice in front of the loop,
    # and keep the copies.
    zero = (column < 0).astype(jnp.int32)
    take = lambda i: jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, zero + i, keepdims=False), layers.tree
    )
    return map(take, range(layers.length))


def make_layer_caches(prefix: Prefix | None, k, v, mask, room: int = 0) -> tuple[LayerCache, ...]:
    """Joins the prefix, the keys and values read so far, and `room` empty columns.

    [L, B, T, N, D] x 2, bool [B, T] -> L memories of columns S = P + T + room
    """
    # They have no axis of layers to be taken apart by.
    prefix = prefix and prefix._replace(positions=None)
    found = []
    for front, own_k, own_v in unstack((prefix, k, v), k.shape[0]):
        own_k, own_v, seen = prepend_prefix(front, own_k, own_v, AttentionMask(mask))
        # The mask is padded with False, so a column is hidden until a token is written there.
        k_all, v_all, seen = (_grow(x, room) for x in (own_k, own_v, seen.mask))
        heads_first = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
        found.append(LayerCache(heads_first(k_all), heads_first(v_all), seen))
    return tuple(found)


def column_positions(prefix: Prefix | None, positions, room: int):
    """Returns the positions of a memory's columns, -1 = no relative bias. int [B, T] -> [B, S]

    The columns of `room` are 0 until a token is written there.
    """
    if prefix is not None:
        outside = jnp.full(prefix.k.shape[2], -1, jnp.int32)
        where = outside if prefix.positions is None else prefix.positions
        where = jnp.broadcast_to(where, (positions.shape[0], where.shape[0]))
        positions = jnp.concatenate([where, positions], axis=1)
    return _grow(positions, room)


def write_token(memory: LayerCache, k, v, column) -> LayerCache:
    """Writes one token of each row into a column. [B, N, D] x 2, int scalar"""
    # All rows write the same column, so that a slice will do and no scatter is needed.
    put = jax.lax.dynamic_update_slice_in_dim
    seen = jnp.ones((len(memory.mask), 1), bool)
    return LayerCache(
        put(memory.k, k[:, :, None].astype(memory.k.dtype), column, 2),
        put(memory.v, v[:, :, None].astype(memory.v.dtype), column, 2),
        put(memory.mask, seen, column, 1),
    )


def write_position(cache: Cache, positions, column) -> Cache:
    """Writes the position of the token in a column. int [B], int scalar"""
    put = jax.lax.dynamic_update_slice_in_dim
    return cache._replace(positions=put(cache.positions, positions[:, None], column, 1))


def repeat_for_beams(cache: Cache, num_beams: int) -> Cache:
    """Repeats the cache of a row for each of its beams, except `cross`. [B, ...] -> [B*K, ...]"""
    own, positions = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, num_beams, axis=0), (cache.self_attention, cache.positions)
    )
    return cache._replace(self_attention=own, positions=positions)


def select_beams(cache: Cache, parents) -> Cache:
    """Selects for each beam the cache of one of its row's beams, except `cross`. int [B, K] < K

    Selection is within a row: across rows, a mesh would send the whole cache around.
    """
    rows, num_beams = parents.shape

    def pick(leaf):
        own = leaf.reshape(rows, num_beams, *leaf.shape[1:])
        at = parents.reshape(rows, num_beams, *[1] * (leaf.ndim - 1))
        return jnp.take_along_axis(own, at, axis=1).reshape(leaf.shape)

    own, positions = jax.tree.map(pick, (cache.self_attention, cache.positions))
    return cache._replace(self_attention=own, positions=positions)


def _grow(x, room: int):
    return jnp.pad(x, [(0, room if axis == 1 else 0) for axis in range(x.ndim)])
