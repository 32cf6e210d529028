"""Keys and values of earlier tokens, cached for later ones. Shapes never change.

Each layer has separate arrays, with heads before columns: a loop writes them in place, and no step
slices a stack or transposes.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxprompt.layers.attention import prepend_prefix
from jaxprompt.layers.quantized import as_matrices, has_quantized
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
    if copies_layers(current_target().platform):
        return unstack(tree, length)
    return StackedLayers(tree, length)


def iterate_layers(layers: tuple | StackedLayers, column) -> Iterable[Any]:
    """Returns the weights of each layer, inside a loop that counts `column`, int scalar >= 0."""
    if not isinstance(layers, StackedLayers):
        return layers
    # Always 0, which the compiler does not know: otherwise it would slice before the loop and keep
    # the copies.
    zero = (column < 0).astype(jnp.int32)

    def layer_at(i):
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, zero + i, keepdims=False), layers.tree
        )

    return map(layer_at, range(layers.length))


def step_layers(
    layer: Any,
    layers: Iterable[Any],
    x,
    caches: Sequence[LayerCache],
    per_layer: Iterable[tuple[Any, ...]],
):
    """Runs one more token of each beam through the layers. [B*K, H] -> [B*K, H], the caches with it

    `layers` are those of `iterate_layers`, `per_layer` the other arguments of each one's `step`.
    """
    new_caches = []
    for params, layer_cache, inputs in zip(layers, caches, per_layer, strict=True):
        if has_quantized(params) and copies_layers(current_target().platform):
            # Otherwise the compiler might dequantise all layers once, before the loop.
            params = jax.lax.optimization_barrier((params, x))[0]
        variables = {"params": as_matrices(params)}
        x, layer_cache = layer.apply(variables, x, layer_cache, *inputs, method="step")
        new_caches.append(layer_cache)
    return x, tuple(new_caches)


def make_cache(
    prefix: Prefix | None,
    k,
    v,
    mask,
    positions,
    max_new_tokens: int,
    num_beams: int,
    cross: tuple[LayerCache, ...] | None = None,
) -> Cache:
    """Returns the cache of an input, with room for the new tokens of its beams.

    [L, B, T, N, D] x 2, bool [B, T], int [B, T]
    """
    num_free = max_new_tokens * num_beams
    positions = _column_positions(prefix, positions, num_free)
    visible = jnp.zeros((len(positions), num_beams, positions.shape[1]), bool)
    return Cache(make_layer_caches(prefix, k, v, mask, num_free), positions, visible, cross)


def make_layer_caches(
    prefix: Prefix | None, k, v, mask, num_free: int = 0
) -> tuple[LayerCache, ...]:
    """Joins the prefix, the keys and values read so far, and `num_free` empty columns.

    [L, B, T, N, D] x 2, bool [B, T] -> L `LayerCache`s of columns S = P + T + num_free
    """
    # Positions have no axis of layers to split.
    prefix = prefix and prefix._replace(positions=None)
    caches = []
    for layer_prefix, k_part, v_part in unstack((prefix, k, v), k.shape[0]):
        text = k_part, v_part, AttentionMask(mask)
        k_all, v_all, full_mask = prepend_prefix(layer_prefix, *text)
        columns = k_all, v_all, full_mask.mask
        k_all, v_all, column_mask = (_pad_columns(x, num_free) for x in columns)
        heads_first = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
        caches.append(LayerCache(heads_first(k_all), heads_first(v_all), column_mask))
    return tuple(caches)


def _column_positions(prefix: Prefix | None, positions, num_free: int):
    """Returns the positions of a cache's columns, -1 = no relative bias. int [B, T] -> [B, S]"""
    if prefix is not None:
        no_positions = jnp.full(prefix.k.shape[2], -1, jnp.int32)
        prefix_positions = no_positions if prefix.positions is None else prefix.positions
        shape = positions.shape[0], prefix_positions.shape[0]
        prefix_positions = jnp.broadcast_to(prefix_positions, shape)
        positions = jnp.concatenate([prefix_positions, positions], axis=1)
    return _pad_columns(positions, num_free)


def write_token(layer_cache: LayerCache, k, v, column) -> LayerCache:
    """Writes one token of each beam into K columns from `column` on. [B*K, N, D] x 2, int scalar"""

    def write(columns, token):
        token = token.reshape(len(columns), -1, *token.shape[1:]).swapaxes(1, 2)  # [B, N, K, D]
        # All rows write the same columns, so a slice is enough and no scatter is needed.
        return _update_columns(columns, token.astype(columns.dtype), column, 2)

    return layer_cache._replace(k=write(layer_cache.k, k), v=write(layer_cache.v, v))


def write_position(cache: Cache, positions, column) -> Cache:
    """Writes the positions of a token of each beam. int [B*K], int scalar"""
    positions = positions.reshape(len(cache.positions), -1)
    return cache._replace(positions=_update_columns(cache.positions, positions, column, 1))


def show_token(cache: Cache, column) -> Cache:
    """Makes each of the K columns from `column` on visible to its beam. int scalar"""
    rows, num_beams, _ = cache.visible.shape
    is_beam = jnp.broadcast_to(jnp.eye(num_beams, dtype=bool), (rows, num_beams, num_beams))
    return cache._replace(visible=_update_columns(cache.visible, is_beam, column, 2))


def select_beams(cache: Cache, parents) -> Cache:
    """Continues for each beam one of its row's beams: it sees the tokens of that one. int [B, K]

    Keys and values stay where they are.
    """
    visible = jnp.take_along_axis(cache.visible, parents[:, :, None], axis=1)
    return cache._replace(visible=visible)


_update_columns = jax.lax.dynamic_update_slice_in_dim


def _pad_columns(x, num_free: int):
    return jnp.pad(x, [(0, num_free if axis == 1 else 0) for axis in range(x.ndim)])
