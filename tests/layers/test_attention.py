"""Attention against plain numpy, with prefixes, masks and both kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, assert_equal, fill

from jaxprompt.layers.attention import SelfAttention, attend, choose_kernel
from jaxprompt.types import Prefix

B, T, S, N, D = 3, 4, 6, 2, 8
RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


Q, K, V = draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D)
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1]], bool)


def reference(q, k, v, mask):
    """Attends row by row over the kept keys alone, in float64."""
    out = np.zeros(q.shape)
    for b in range(q.shape[0]):
        for n in range(q.shape[2]):
            keys, values = (x[b, mask[b], n].astype(np.float64) for x in (k, v))
            scores = q[b, :, n] @ keys.T / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[b, :, n] = weights / weights.sum(-1, keepdims=True) @ values
    return out.astype(np.float32)


@pytest.mark.parametrize("kernel", ["auto", "einsum", "fused"])
def test_attend_is_softmax_over_the_kept_keys(kernel):
    assert_close(attend(Q, K, V, MASK, kernel=kernel), reference(Q, K, V, MASK))


def test_kernels_have_the_same_gradients():
    loss = lambda kernel: lambda *qkv: (attend(*qkv, MASK, kernel=kernel) ** 2).sum()
    one, other = (jax.grad(loss(k), argnums=(0, 1, 2))(Q, K, V) for k in ("einsum", "fused"))
    assert_close(one, other)
    assert all(np.abs(g).max() > 0.1 for g in one)
    for masked in (one[1], one[2]):
        assert np.abs(masked[~MASK]).max() == 0


def test_masked_keys_have_no_part_whatever_they_hold():
    keep = MASK[:, :, None, None]
    spoilt = attend(Q, np.where(keep, K, 1e4), np.where(keep, V, -1e4), MASK, kernel="einsum")
    assert_equal(spoilt, attend(Q, K, V, MASK, kernel="einsum"))
    zeros = attend(Q, np.where(keep, K, 0), np.where(keep, V, 0), np.ones_like(MASK))
    assert np.abs(zeros - reference(Q, K, V, MASK)).max() > 0.1


def test_a_row_without_keys_attends_evenly():
    found = attend(Q, K, V, np.zeros_like(MASK), kernel="einsum")
    expected = np.broadcast_to(V.mean(1, keepdims=True), Q.shape)
    assert_close(found, expected)


def test_softmax_is_float32_for_bfloat16():
    half = lambda x: jnp.asarray(x, jnp.bfloat16)
    found = attend(half(Q), half(K), half(V), MASK, kernel="einsum")
    assert found.dtype == jnp.bfloat16
    rounded = [np.asarray(half(x), np.float32) for x in (Q, K, V)]
    assert_close(found, reference(*rounded, MASK), rtol=0.02)


@pytest.mark.parametrize(
    "kernel, dtype, head_dim, dropout, backend, chosen",
    [
        ("auto", "bfloat16", 64, False, "gpu", "fused"),
        ("auto", "float16", 128, False, "gpu", "fused"),
        ("auto", "float32", 64, False, "gpu", "einsum"),
        ("auto", "bfloat16", 60, False, "gpu", "einsum"),
        ("auto", "bfloat16", 136, False, "gpu", "einsum"),
        ("auto", "bfloat16", 64, True, "gpu", "einsum"),
        ("auto", "bfloat16", 64, False, "cpu", "einsum"),
        ("fused", "float32", 60, True, "cpu", "fused"),
        ("einsum", "bfloat16", 64, False, "gpu", "einsum"),
    ],
)
def test_choice_of_kernel(monkeypatch, kernel, dtype, head_dim, dropout, backend, chosen):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert choose_kernel(kernel, jnp.dtype(dtype), head_dim, dropout) == chosen


def test_dropout_falls_on_the_probabilities():
    """With one kept key its weight is 1, so a head's output is 0 or v / (1 - rate)."""
    mask = np.arange(S) == 2
    found = attend(Q, K, V, np.broadcast_to(mask, MASK.shape), dropout=0.5, key=jax.random.key(0))
    kept = np.abs(found).max(-1) > 0  # [B, T, N]
    assert 0 < kept.mean() < 1
    expected = np.where(kept[..., None], V[:, None, 2] / 0.5, 0.0)
    assert_close(found, expected)


@pytest.mark.parametrize("rows", [1, B])
def test_prefix_stands_in_front_of_the_keys(rows):
    width, length = N * D, 2
    layer = SelfAttention(N, D, dropout=0.1)
    x, mask = draw(B, S, width), MASK
    prefix = Prefix(
        draw(rows, length, N, D), draw(rows, length, N, D), np.array([[True, False]] * rows)
    )
    init = lambda: layer.init(jax.random.key(0), x, mask, deterministic=True)["params"]
    params = fill(jax.eval_shape(init))
    assert set(params) == {"query", "key", "value", "out"}
    found = layer.apply({"params": params}, x, mask, prefix, deterministic=True)
    project = lambda p: np.einsum("btw,wnd->btnd", x, p["kernel"]) + p["bias"]
    spread = lambda y: np.broadcast_to(y, (B, *y.shape[1:]))
    q, k, v = (project(params[name]) for name in ("query", "key", "value"))
    k, v = (np.concatenate([spread(p), y], 1) for p, y in ((prefix.k, k), (prefix.v, v)))
    full = np.concatenate([spread(prefix.mask), mask], 1)
    mixed = reference(q, k, v, full)
    expected = np.einsum("btnd,ndw->btw", mixed, params["out"]["kernel"]) + params["out"]["bias"]
    assert_close(found, expected)
    plain = layer.apply({"params": params}, x, mask, deterministic=True)
    assert found.shape == plain.shape and np.abs(found - plain).max() > 0.01
    none = prefix._replace(mask=np.zeros((rows, length), bool))
    masked = layer.apply({"params": params}, x, mask, none, deterministic=True)
    assert_close(masked, plain, rtol=1e-6)
