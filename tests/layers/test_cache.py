"""The cache: what is written where, and attention over it against attention over all at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, assert_equal

from jaxprompt.layers.attention import attend, attend_cached
from jaxprompt.layers.cache import (
    make_cache,
    make_layer_caches,
    select_beams,
    show_token,
    unstack,
    widen_cache,
    write_position,
    write_token,
)
from jaxprompt.types import AttentionMask, LayerCache, Prefix

L, B, P, T, N, D, ROOM = 2, 3, 2, 4, 2, 5, 3
RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


K, V = draw(L, B, T, N, D), draw(L, B, T, N, D)
MASK = np.array([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]], bool)
POSITIONS = np.array([[0, 1, 2, 3], [0, 0, 0, 1], [0, 0, 0, 0]], np.int32)
FRONT = Prefix(draw(L, 1, P, N, D), draw(L, 1, P, N, D), np.array([[[1, 1]], [[0, 0]]], bool))


def test_unstack():
    tree = {"a": np.arange(6).reshape(2, 3), "b": None}
    first, second = unstack(tree, 2)
    assert_equal(first, {"a": np.array([0, 1, 2]), "b": None})
    assert_equal(second, {"a": np.array([3, 4, 5]), "b": None})


@pytest.mark.parametrize("prefix", [None, FRONT])
def test_make_layer_caches(prefix):
    layer_caches = make_layer_caches(prefix, K, V, MASK, ROOM)
    first = ROOM + P if prefix else ROOM
    assert len(layer_caches) == L
    for i, layer_cache in enumerate(layer_caches):
        assert layer_cache.k.shape == layer_cache.v.shape == (B, N, first + T, D)
        for actual, values, ahead in ((layer_cache.k, K, FRONT.k), (layer_cache.v, V, FRONT.v)):
            assert_equal(actual[:, :, first:], values[i].swapaxes(1, 2))
            if prefix:
                expected = np.broadcast_to(ahead[i].swapaxes(1, 2), (B, N, P, D))
                assert_equal(actual[:, :, ROOM:first], expected)
        assert_equal(layer_cache.mask[:, first:], MASK)
        assert not layer_cache.mask[:, :ROOM].any()
        assert (np.asarray(layer_cache.mask[:, ROOM:first]) == (i == 0)).all()


def test_make_cache():
    """Columns of each beam's new tokens, of the prefix, and of the input."""
    for where in (None, np.arange(P, dtype=np.int32)):
        front = FRONT._replace(positions=where)
        cache = make_cache(front, K, V, MASK, POSITIONS, ROOM, 2)
        free = 2 * ROOM
        assert cache.self_attention[1].k.shape == (B, N, free + P + T, D)
        assert_equal(cache.positions[:, free + P :], POSITIONS)
        prefix_positions = np.asarray(cache.positions[:, free : free + P])
        assert (prefix_positions == (-1 if where is None else where)).all()
        assert cache.visible.shape == (B, 2, free + P + T) and not cache.visible.any()


def test_widen_cache():
    """To the room and the width of another input; what is empty is hidden."""
    cross = make_layer_caches(None, K, V, MASK)
    narrow = make_cache(FRONT, K, V, MASK, POSITIONS, 0, 2, cross)
    assert_equal(
        widen_cache(narrow, 2 * ROOM), make_cache(FRONT, K, V, MASK, POSITIONS, ROOM, 2, cross)
    )
    k, v, mask, positions = (
        np.concatenate([x, x], axis=axis) for x, axis in ((K, 2), (V, 2), (MASK, 1), (POSITIONS, 1))
    )
    wide = make_cache(FRONT, k, v, mask, positions, ROOM, 2, make_layer_caches(None, k, v, mask))
    wider = widen_cache(narrow, 2 * ROOM, wide)
    assert jax.tree.map(jnp.shape, wider) == jax.tree.map(jnp.shape, wide)
    read = 2 * ROOM + P + T
    for part, other, before, after in (
        (wider.self_attention[1], wide.self_attention[1], 0, read),
        (wider.cross[1], wide.cross[1], 0, T),
    ):
        assert_equal(part.k[:, :, before:after], other.k[:, :, before:after])
        assert_equal(part.mask[:, before:after], other.mask[:, before:after])
        assert not part.mask[:, after:].any()


def test_a_token_of_each_beam_fills_one_column():
    """Two steps of two beams: the second extends other beams than those that wrote the first."""
    before = make_cache(FRONT, K, V, MASK, POSITIONS, ROOM, 2)
    tokens = [(draw(2 * B, N, D), draw(2 * B, N, D)) for _ in range(2)]
    positions = np.repeat(np.array([4, 2, 1], np.int32), 2)

    @jax.jit
    def run(cache):
        cache = write_position(show_token(cache, 0), positions, 0)
        layer = write_token(cache.self_attention[0], *tokens[0], 0)
        cache = select_beams(cache, np.array([[1, 1], [0, 1], [1, 0]]))
        cache = write_position(show_token(cache, 2), positions + 1, 2)
        return cache, write_token(layer, *tokens[1], 2)

    cache, layer = run(before)
    for i, column in enumerate((0, 2)):
        for actual, expected in zip((layer.k, layer.v), tokens[i], strict=True):
            by_beam = expected.reshape(B, 2, N, D).swapaxes(1, 2)
            assert_equal(actual[:, :, column : column + 2], by_beam)
        for beam in range(2):
            assert_equal(cache.positions[:, column + beam], positions[::2] + i)
    assert_equal(layer.k[:, :, 4:], before.self_attention[0].k[:, :, 4:])
    assert_equal(layer.mask, before.self_attention[0].mask)
    visible = np.zeros(cache.visible.shape, bool)
    for row, parents in enumerate([[1, 1], [0, 1], [1, 0]]):
        for beam, parent in enumerate(parents):
            visible[row, beam, [parent, 2 + beam]] = True
    assert_equal(cache.visible, visible)


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("heads_of_key", [1, 2])
def test_attend_cached_equals_attend(scale, beams, heads_of_key):
    """Of rows whose beams share keys, of which each sees other columns."""
    q = draw(B * beams, N * heads_of_key, D)
    bias = draw(B, N, 1, P + T + ROOM) if heads_of_key == 1 else None
    layer_cache = make_layer_caches(FRONT, K, V, MASK, ROOM)[0]
    mask = layer_cache.mask[:, None] | (RNG.random((B, beams, P + T + ROOM)) < 0.5)
    k, v = (np.repeat(x.swapaxes(1, 2), beams, axis=0) for x in layer_cache[:2])
    each_mask = AttentionMask(np.asarray(mask).reshape(B * beams, -1))
    each_bias = None if bias is None else np.repeat(bias, beams, axis=0)
    expected = attend(q[:, None], k, v, each_mask, each_bias, scale=scale)[:, 0]
    assert_close(attend_cached(q, layer_cache, mask, bias, scale=scale), expected)


def test_what_a_cache_hides_has_no_part():
    layer_cache = make_layer_caches(None, K, V, MASK, ROOM)[0]
    mask = layer_cache.mask[:, None]
    hidden = ~mask[..., None]
    spoilt = LayerCache(
        np.where(hidden, 1e4, layer_cache.k),
        np.where(hidden, -1e4, layer_cache.v),
        layer_cache.mask,
    )
    q = draw(B, N, D)
    assert_equal(attend_cached(q, spoilt, mask), attend_cached(q, layer_cache, mask))
