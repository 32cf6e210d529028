"""The cache: what is written where, and attention over it against attention over all at once."""

import jax
import numpy as np
import pytest
from tiny import assert_close, assert_equal

from jaxprompt.layers.attention import attend, attend_cached, prepend_prefix
from jaxprompt.layers.cache import (
    column_positions,
    make_layer_caches,
    repeat_for_beams,
    select_beams,
    unstack,
    write_position,
    write_token,
)
from jaxprompt.types import AttentionMask, Cache, LayerCache, Prefix

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
def test_remember(prefix):
    memories = make_layer_caches(prefix, K, V, MASK, ROOM)
    front = P if prefix else 0
    assert len(memories) == L
    for i, memory in enumerate(memories):
        assert memory.k.shape == memory.v.shape == (B, N, front + T + ROOM, D)
        for actual, values, ahead in ((memory.k, K, FRONT.k), (memory.v, V, FRONT.v)):
            assert_equal(actual[:, :, front : front + T], values[i].swapaxes(1, 2))
            if prefix:
                expected = np.broadcast_to(ahead[i].swapaxes(1, 2), (B, N, P, D))
                assert_equal(actual[:, :, :P], expected)
        assert_equal(memory.mask[:, front : front + T], MASK)
        assert not memory.mask[:, front + T :].any()
        assert (np.asarray(memory.mask[:, :front]) == (i == 0)).all()


def test_place():
    assert_equal(column_positions(None, POSITIONS, 2), np.pad(POSITIONS, [(0, 0), (0, 2)]))
    outside, inside = (
        np.asarray(column_positions(FRONT._replace(positions=where), POSITIONS, 0))
        for where in (None, np.arange(P, dtype=np.int32))
    )
    assert_equal(outside[:, P:], POSITIONS)
    assert_equal(inside[:, P:], POSITIONS)
    assert (outside[:, :P] == -1).all() and (inside[:, :P] == [0, 1]).all()


def test_write_fills_one_column():
    before = make_layer_caches(FRONT, K, V, MASK, ROOM)[0]
    k, v = draw(B, N, D), draw(B, N, D)
    after = jax.jit(write_token)(before, k, v, P + T + 1)
    assert_equal(after.k[:, :, P + T + 1], k)
    assert_equal(after.v[:, :, P + T + 1], v)
    assert after.mask[:, P + T + 1].all() and not after.mask[:, [P + T, P + T + 2]].any()
    others = np.delete(np.arange(P + T + ROOM), P + T + 1)
    assert_equal(after.k[:, :, others], before.k[:, :, others])
    assert_equal(after.mask[:, others], before.mask[:, others])
    cache = Cache((before,), column_positions(FRONT, POSITIONS, ROOM))
    moved = write_position(cache, np.array([4, 2, 1], np.int32), P + T)
    assert_equal(moved.positions[:, P + T], np.array([4, 2, 1], np.int32))
    assert_equal(moved.positions[:, : P + T], cache.positions[:, : P + T])


def test_beams_take_from_their_own_row_and_leave_the_source():
    self_cache, cross = (
        make_layer_caches(None, K, V, MASK, ROOM),
        make_layer_caches(None, K, V, MASK),
    )
    cache = Cache(self_cache, column_positions(None, POSITIONS, ROOM), cross)
    wide = repeat_for_beams(cache, 2)
    assert_equal(wide.self_attention[1].v, self_cache[1].v[np.array([0, 0, 1, 1, 2, 2])])
    marks = np.arange(6, dtype=np.int32)[:, None] + 0 * wide.positions
    actual = select_beams(wide._replace(positions=marks), np.array([[1, 1], [0, 1], [1, 0]]))
    rows = np.array([1, 1, 2, 3, 5, 4])
    assert_equal(actual.positions, marks[rows])
    assert_equal(actual.self_attention[1].v, wide.self_attention[1].v[rows])
    assert_equal(actual.self_attention[0].mask, wide.self_attention[0].mask[rows])
    assert actual.cross is wide.cross is cache.cross


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("fold", [1, 3])
def test_recall_equals_attend(scale, fold):
    """`fold` rows in a row share one memory."""
    q, bias = draw(B * fold, N, D), draw(B * fold, N, P + T + ROOM)
    memory = make_layer_caches(FRONT, K, V, MASK, ROOM)[0]
    front = Prefix(FRONT.k[0], FRONT.v[0], FRONT.mask[0])
    k, v, joined = prepend_prefix(front, K[0], V[0], AttentionMask(MASK))
    k, v, mask = (np.repeat(x, fold, axis=0) for x in (k, v, joined.mask))
    for added, visible_bias in ((bias, bias[:, :, None, : P + T]), (None, None)):
        expected = attend(q[:, None], k, v, AttentionMask(mask), visible_bias, scale=scale)[:, 0]
        assert_close(attend_cached(q, memory, added, scale=scale), expected)


def test_what_a_memory_hides_has_no_part():
    memory = make_layer_caches(None, K, V, MASK, ROOM)[0]
    hidden = ~memory.mask[:, None, :, None]
    spoilt = LayerCache(
        np.where(hidden, 1e4, memory.k), np.where(hidden, -1e4, memory.v), memory.mask
    )
    q = draw(B, N, D)
    assert_equal(attend_cached(q, spoilt), attend_cached(q, memory))
