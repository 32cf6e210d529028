"""Attention against plain numpy, with prefixes, masks, biases and both kernels."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, assert_equal, draw_params

from jaxprompt.layers.attention import (
    Attention,
    attend,
    bidirectional_mask,
    causal_mask,
    prepend_prefix,
)
from jaxprompt.types import AttentionMask, Prefix, Tokens

B, T, S, N, D = 3, 4, 6, 2, 8
RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


Q, K, V = draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D)
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1]], bool)


FULL = RNG.random((B, T, S)) < 0.6  # [B, T, S], each query with keys of its own
FULL[..., 0] |= ~FULL.any(-1)


def reference(q, k, v, mask, bias=None, scale=None):
    """Attends query by query over its kept keys alone, in float64."""
    out = np.zeros(q.shape)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = np.broadcast_to(mask if mask.ndim == 3 else mask[:, None], (*q.shape[:2], k.shape[1]))
    for b, t, n in np.ndindex(q.shape[:3]):
        visible = mask[b, t]
        keys, values = (x[b, visible, n].astype(np.float64) for x in (k, v))
        scores = keys @ q[b, t, n].astype(np.float64) * scale
        if bias is not None:
            scores = scores + bias[b % len(bias), n, t, visible]
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ values
    return out.astype(np.float32)


@pytest.mark.parametrize("mask", [MASK, FULL], ids=["a row", "a query"])
@pytest.mark.parametrize("kernel", ["auto", "einsum", "fused"])
def test_attend_is_softmax_over_the_kept_keys(kernel, mask):
    assert_close(attend(Q, K, V, AttentionMask(mask), kernel=kernel), reference(Q, K, V, mask))


@pytest.mark.parametrize("mask", [MASK, FULL], ids=["a row", "a query"])
def test_heads_that_share_keys_attend_to_the_same_ones(mask):
    """Of four heads the first two read the first of two heads of keys, the others the second."""
    q = draw(B, T, 2 * N, D)
    k, v = (np.repeat(x, 2, axis=2) for x in (K, V))
    assert_close(attend(q, K, V, AttentionMask(mask), kernel="einsum"), reference(q, k, v, mask))


@pytest.mark.parametrize("kernel", ["einsum", "fused"])
@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_bias_is_added_to_the_scores(kernel, rows, scale):
    bias = 3 * draw(rows, N, T, S)
    for mask in (MASK, FULL):
        outputs = attend(Q, K, V, AttentionMask(mask), bias, scale=scale, kernel=kernel)
        assert_close(outputs, reference(Q, K, V, mask, bias, scale))
        assert np.abs(outputs - reference(Q, K, V, mask, None, scale)).max() > 0.1


def test_a_large_bias_does_not_lift_a_masked_key():
    bias = np.where(FULL[:, None], 0.0, 1e4).astype(np.float32) * np.ones((1, N, 1, 1), np.float32)
    assert_close(attend(Q, K, V, AttentionMask(FULL), bias), reference(Q, K, V, FULL))


def test_kernels_have_the_same_gradients():
    loss = lambda kernel: lambda *qkv: (attend(*qkv, AttentionMask(MASK), kernel=kernel) ** 2).sum()
    one, other = (jax.grad(loss(k), argnums=(0, 1, 2))(Q, K, V) for k in ("einsum", "fused"))
    assert_close(one, other)
    assert all(np.abs(g).max() > 0.1 for g in one)
    for masked in (one[1], one[2]):
        assert np.abs(masked[~MASK]).max() == 0


def test_masked_keys_have_no_part_whatever_they_hold():
    keep = MASK[:, :, None, None]
    spoilt = attend(Q, np.where(keep, K, 1e4), np.where(keep, V, -1e4), AttentionMask(MASK))
    assert_equal(spoilt, attend(Q, K, V, AttentionMask(MASK)))
    zeros = attend(Q, np.where(keep, K, 0), np.where(keep, V, 0), AttentionMask(np.ones_like(MASK)))
    assert np.abs(zeros - reference(Q, K, V, MASK)).max() > 0.1


def test_a_row_without_keys_attends_evenly():
    outputs = attend(Q, K, V, AttentionMask(np.zeros_like(MASK)), kernel="einsum")
    expected = np.broadcast_to(V.mean(1, keepdims=True), Q.shape)
    assert_close(outputs, expected)


def test_softmax_is_float32_for_bfloat16():
    half = lambda x: jnp.asarray(x, jnp.bfloat16)
    outputs = attend(half(Q), half(K), half(V), AttentionMask(MASK), kernel="einsum")
    assert outputs.dtype == jnp.bfloat16
    rounded = [np.asarray(half(x), np.float32) for x in (Q, K, V)]
    assert_close(outputs, reference(*rounded, MASK), rtol=0.02)


def test_16_bit_probabilities_are_all_that_is_kept_for_the_backward_pass():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (Q, K, V))

    def loss(q, k, v):
        return attend(q, k, v, AttentionMask(jnp.asarray(MASK))).astype(jnp.float32).sum()

    _, back = jax.vjp(loss, q, k, v)
    residuals = [leaf for leaf in jax.tree.leaves(back) if leaf.shape == (B, N, T, S)]
    assert residuals and all(leaf.dtype == jnp.bfloat16 for leaf in residuals)
    exact = jax.grad(
        lambda *x: attend(*x, AttentionMask(jnp.asarray(MASK))).sum(), argnums=(0, 1, 2)
    )(*(x.astype(jnp.float32) for x in (q, k, v)))
    for actual, expected in zip(back(jnp.float32(1.0)), exact, strict=True):
        assert_close(actual, expected, rtol=0.03)


def test_dropout_falls_on_the_probabilities():
    """With one kept key its weight is 1, so a head's output is 0 or v / (1 - rate)."""
    mask = np.arange(S) == 2
    attention_mask = AttentionMask(np.broadcast_to(mask, MASK.shape))
    outputs = attend(Q, K, V, attention_mask, dropout=0.5, key=jax.random.key(0))
    nonzero = np.abs(outputs).max(-1) > 0  # [B, T, N]
    assert 0 < nonzero.mean() < 1
    expected = np.where(nonzero[..., None], V[:, None, 2] / 0.5, 0.0)
    assert_close(outputs, expected)


def draw_layer(**options):
    """Makes an attention of width 10 whose heads are N * D wide. -> (module, params)"""
    layer = Attention(10, N, D, **options)
    x, mask = draw(B, S, 10), np.ones((B, S), bool)
    run = lambda m, x: m(x, *m.keys(x), AttentionMask(mask), deterministic=True)
    return layer, draw_params(layer, x, method=run)


def linear(x, params):
    y = np.einsum("btw,wnd->btnd", x, params["kernel"])
    return y + np.array(params["bias"]) if "bias" in params else y


@pytest.mark.parametrize("options", [{}, dict(scale=1.0, use_bias=False)])
def test_attention_projects_attends_and_projects(options):
    layer, params = draw_layer(dropout=0.1, **options)
    x, source, bias = draw(B, T, 10), draw(B, S, 10), draw(1, N, T, S)
    assert set(params) == {"query", "key", "value", "out"}
    has_bias = options.get("use_bias", True)
    assert all(("bias" in part) == has_bias for part in params.values())
    k, v = layer.apply({"params": params}, source, method="keys")
    assert_close(k, linear(source, params["key"]))
    assert_close(v, linear(source, params["value"]))
    actual = layer.apply({"params": params}, x, k, v, AttentionMask(FULL), bias, deterministic=True)
    scale = options.get("scale")
    mixed = reference(linear(x, params["query"]), np.array(k), np.array(v), FULL, bias, scale)
    expected = np.einsum("btnd,ndw->btw", mixed, params["out"]["kernel"])
    assert_close(actual, expected + params["out"]["bias"] if has_bias else expected)


@pytest.mark.default_cases("t5-keys", "dropout-queries")
@pytest.mark.parametrize("mask", [MASK, FULL], ids=["keys", "queries"])
@pytest.mark.parametrize(
    "options", [{}, dict(scale=1.0, use_bias=False), dict(dropout=0.4)], ids=["", "t5", "dropout"]
)
def test_few_queries_need_no_keys_and_values(options, mask):
    """Values and gradients are those of attention over keys and values, also with dropout."""
    layer, params = draw_layer(**options)
    x, source, weights = draw(B, T, 10), draw(B, S, 10), draw(B, T, 10)

    def loss(inputs, without_keys):
        params, x, source = inputs

        def run(module):
            options = dict(deterministic=False)
            if without_keys:
                return module.attend_to_source(x, source, AttentionMask(mask), **options)
            return module(x, *module.keys(source), AttentionMask(mask), **options)

        rngs = {"dropout": jax.random.key(0)}
        return (layer.apply({"params": params}, method=run, rngs=rngs) * weights).sum()

    results = [
        jax.jit(jax.value_and_grad(loss), static_argnums=1)((params, x, source), without_keys)
        for without_keys in (False, True)
    ]
    # That of a bias of keys is the rounding of 0.
    for _, gradients in results:
        assert np.abs(gradients[0]["key"].pop("bias", np.zeros(1))).max() < 1e-5
    assert_close(results[1], results[0], rtol=4e-6)  # of a sum with both signs


def test_keys_are_left_out_where_that_is_fewer_products():
    layer = Attention(10, 4, 64).bind({"params": {}})
    cases = ((2, 512), (31, 512), (32, 512), (2, 4), (2, 5))
    assert [layer.is_faster_without_keys(*case) for case in cases] == [
        True,
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("mask", [MASK, FULL], ids=["keys", "queries"])
def test_prefix_stands_in_front_of_the_keys(rows, mask):
    length = 2
    prefix = Prefix(
        draw(rows, length, N, D), draw(rows, length, N, D), np.array([[True, False]] * rows)
    )
    k, v, longer_mask = prepend_prefix(prefix, K, V, AttentionMask(mask))
    spread = lambda y: np.broadcast_to(y, (B, *y.shape[1:]))
    assert_equal(k, np.concatenate([spread(prefix.k), K], 1))
    assert_equal(v, np.concatenate([spread(prefix.v), V], 1))
    front = np.zeros((*mask.shape[:-1], length), bool)
    front[..., 0] = True
    assert_equal(longer_mask.mask, np.concatenate([front, mask], -1))
    assert_close(
        attend(Q, k, v, longer_mask), reference(Q, *map(np.array, (k, v, longer_mask.mask)))
    )
    assert np.abs(attend(Q, k, v, longer_mask) - attend(Q, K, V, AttentionMask(mask))).max() > 0.01
    none = prefix._replace(mask=np.zeros((rows, length), bool))
    masked = attend(Q, *prepend_prefix(none, K, V, AttentionMask(mask)))
    assert_close(masked, attend(Q, K, V, AttentionMask(mask)), rtol=1e-6)


def test_prefix_takes_the_dtype_of_the_stream():
    prefix = Prefix(draw(1, 2, N, D), draw(1, 2, N, D), np.ones((1, 2), bool))
    half = jnp.asarray(K, jnp.bfloat16)
    k, v, _ = prepend_prefix(prefix, half, half, AttentionMask(MASK))
    assert k.dtype == v.dtype == jnp.bfloat16
    mask = AttentionMask(MASK)
    assert prepend_prefix(None, K, V, mask) == (K, V, mask)


def test_causal_mask_keeps_branches_apart():
    """A stem of branch 0, then two branches side by side; pads stand in front and behind."""
    types = np.array([[0, 0, 0, 1, 1, 2, 2, 0], [0, 0, 1, 2, 1, 0, 2, 2]], np.int32)
    mask = np.array([[0, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1]], bool)
    none = np.zeros_like(types)
    actual = np.array(causal_mask(Tokens(none, mask, none - 1, none, types, none)).mask)
    expected = np.zeros((2, 8, 8), bool)
    for b, t, s in np.ndindex(expected.shape):
        sees = types[b, s] in (0, types[b, t])
        expected[b, t, s] = s <= t and mask[b, s] and sees
    assert_equal(actual, expected)
    assert_equal(actual[0, 6], np.array([0, 1, 1, 0, 0, 1, 1, 0], bool))  # branch 2: 0 and itself
    assert_equal(actual[0, 4], np.array([0, 1, 1, 1, 1, 0, 0, 0], bool))
    assert_equal(actual[1, 5], np.array([1, 1, 0, 0, 0, 1, 0, 0], bool))  # branch 0: 0 alone


def test_documents_see_themselves():
    """Two documents and a pad, on either side; branches divide the first."""
    segments = np.array([[1, 1, 1, 2, 2, 0], [0, 1, 2, 2, 2, 2]], np.int32)
    types = np.array([[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 1, 2]], np.int32)
    none = np.zeros_like(types)
    queries = Tokens(none, segments > 0, none - 1, none, types, none, segments)
    keys = Tokens(*(x[:, 1:5] for x in queries[:-1]))
    actual, causal = (
        np.array(bidirectional_mask(queries, keys).mask),
        np.array(causal_mask(queries).mask),
    )
    assert actual.shape == (2, 6, 4) and causal.shape == (2, 6, 6)
    for b, t, s in np.ndindex(causal.shape):
        same_document = segments[b, t] == segments[b, s] > 0
        if 1 <= s < 5:
            assert actual[b, t, s - 1] == same_document
        assert causal[b, t, s] == (same_document and s <= t and types[b, s] in (0, types[b, t]))


def test_one_text_a_row_has_the_mask_of_its_tokens():
    mask = np.array([[1, 1, 0], [1, 1, 1]], bool)
    none = np.zeros((2, 3), np.int32)
    tokens = Tokens(none, mask, none - 1, none, none, none)
    assert bidirectional_mask(tokens, tokens).mask is mask


def test_the_gradient_of_a_prefix_is_summed_in_float32():
    """Of bfloat16 keys too: their sum over a large batch would lose what each row adds."""
    rows = 512
    keys = jnp.zeros((rows, 1, N, D), jnp.bfloat16)
    out = jnp.asarray(RNG.uniform(1, 2, (rows, 2, N, D)), jnp.bfloat16)

    def loss(k, v):
        mask = AttentionMask(np.ones((rows, 1), bool))
        joined = prepend_prefix(Prefix(k, v, None), keys, keys, mask)[:2]
        return sum((x[:, :2] * out).astype(jnp.float32).sum() for x in joined)

    prefix = draw(1, 2, N, D)
    for actual in jax.grad(loss, argnums=(0, 1))(prefix, prefix):
        np.testing.assert_allclose(actual[0], np.asarray(out, np.float64).sum(0), rtol=1e-6)
