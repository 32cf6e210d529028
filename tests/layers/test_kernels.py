"""Kernels of others against two products and a softmax: which is taken, and what it gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.experimental.pallas.ops.tpu import flash_attention

from jaxprompt.layers import kernels
from jaxprompt.layers.attention import attend, bidirectional_mask, causal_mask, prepend_prefix
from jaxprompt.layers.kernels import cudnn, tpu
from jaxprompt.parallel.sharding import Target, make_placement, with_placement
from jaxprompt.types import AttentionMask, AttentionWindow, Prefix, Tokens

N, D = 2, 8
GPU, V100, TPU, CPU = Target("gpu", 8.0), Target("gpu", 7.0), Target("tpu"), Target("cpu")
HOPPER = Target("gpu", 9.0)


@pytest.mark.parametrize(
    "target, requested, changes, chosen",
    [
        (GPU, "auto", {}, "cudnn"),
        (GPU, "auto", dict(dtype="float16", head_dim=128), "cudnn"),
        (GPU, "auto", dict(dtype="float32"), "einsum"),
        (GPU, "auto", dict(head_dim=60), "einsum"),
        (GPU, "auto", dict(head_dim=136), "einsum"),
        (HOPPER, "auto", dict(head_dim=256), "cudnn"),
        (HOPPER, "auto", dict(head_dim=264), "einsum"),
        (Target("gpu", 10.0), "auto", dict(head_dim=256), "einsum"),
        (GPU, "auto", dict(has_dropout=True), "einsum"),
        (GPU, "auto", dict(has_key_mask=False), "cudnn"),
        (GPU, "einsum", {}, "einsum"),
        (GPU, "fused", dict(dtype="float32"), "recompute"),
        (GPU, "fused", dict(has_dropout=True), "einsum"),
        (V100, "auto", {}, "einsum"),
        (V100, "fused", {}, "recompute"),
        (CPU, "auto", {}, "einsum"),
        (CPU, "fused", {}, "recompute"),
        (TPU, "auto", {}, "einsum"),
        (GPU, "auto", dict(has_cap=True), "einsum"),
        (GPU, "fused", dict(has_cap=True), "recompute"),
        (TPU, "auto", dict(length=512), "pallas"),
        (TPU, "auto", dict(length=512, head_dim=256, has_cap=True), "pallas"),
        (TPU, "auto", dict(length=512, head_dim=264), "einsum"),
        (TPU, "auto", dict(length=512, head_dim=160), "einsum"),  # with two blocks of keys it fails
        (TPU, "auto", dict(length=512, head_dim=80), "pallas"),
        (TPU, "auto", dict(length=512, has_key_mask=False), "einsum"),
        (TPU, "auto", dict(length=512, dtype="float32"), "einsum"),
        (TPU, "fused", {}, "pallas"),
        (TPU, "fused", dict(has_key_mask=False), "recompute"),
    ],
)
def test_choice(target, requested, changes, chosen):
    options = dict(dtype="bfloat16", head_dim=64, has_dropout=False, length=64, has_key_mask=True)
    assert kernels.choose_kernel(requested, target, **(options | changes)) == chosen


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def tokens_of(rows, length, *, segments=False):
    """Rows of differing lengths, padded on the right; the last one is filling."""
    real = np.array([length, length - 3, length // 2, 0][:rows], np.int32)
    mask = np.arange(length) < real[:, None]
    none = np.zeros(mask.shape, np.int32)
    apart = np.where(mask, 1 + (np.arange(length) > length // 3), 0).astype(np.int32)
    positions = none + np.arange(length, dtype=np.int32)
    return Tokens(ids=none, mask=mask, slot=none - 1, positions=positions, types=none, roles=none,
                  segments=apart if segments else None, lengths=real)  # fmt: skip


CASES = {  # tokens, prefix, causal, segments, rows of a bias, left padding
    "plain": (40, 0, False, False, 0, False),
    "odd, prefix": (37, 5, False, False, 0, False),
    "left": (40, 5, False, False, 0, True),
    "causal": (40, 0, True, False, 0, False),
    "causal, prefix": (37, 5, True, False, 0, False),
    "documents": (40, 0, False, True, 0, False),
    "causal documents": (40, 0, True, True, 0, False),
    "bias": (37, 0, False, False, 1, False),
    "bias a row, prefix": (40, 4, False, False, 4, False),
    "several blocks": (200, 3, False, False, 1, False),
    "bias, causal": (200, 3, True, False, 1, False),
    "several blocks, causal": (200, 70, True, False, 0, False),
}


def make(name):
    """Makes q, k, v, a bias, which keys are seen, and the rows and queries that are real."""
    length, front, causal, segments, biased, left = CASES[name]
    rows = 4
    tokens = tokens_of(rows, length, segments=segments)
    if left:
        tokens = tokens._replace(mask=tokens.mask[:, ::-1], lengths=None)
    mask = causal_mask(tokens) if causal else bidirectional_mask(tokens, tokens)
    q, k, v = (draw(i, rows, length, N, D) for i in range(3))
    if front:
        prefix = Prefix(draw(3, 1, front, N, D), draw(4, 1, front, N, D), None)
        k, v, mask = prepend_prefix(prefix, k, v, mask)
    bias = 2 * draw(5, biased, N, length, length + front) if biased else None
    return (q, k, v, bias), mask, tokens.mask


def run(kernel, qkv, mask, real):
    """Attends, with gradients of what is real. -> float32 output, gradients"""

    def loss(qkv):
        q, k, v, bias = qkv
        y = kernel(q, k, v, mask, bias, D**-0.5)
        y = jnp.where(jnp.asarray(real)[:, :, None, None], y, 0)
        return (y.astype(jnp.float32) * jnp.cos(jnp.arange(D))).sum(), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(qkv)
    return np.float32(y), jax.tree.map(np.float32, grads)


def plainly(q, k, v, mask, bias, scale):
    return attend(q, k, v, AttentionMask(mask.mask), bias, scale=scale, kernel="einsum")


def assert_near(actual, expected):
    """In bfloat16: 1e-3 of the largest in the mean, 2^-6 at most."""
    scale = np.abs(expected).max()
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).mean() <= 1e-3 * scale
    assert np.abs(actual - expected).max() <= 2**-6 * scale


def compare(kernel, case, reference=plainly):
    """Compares a kernel's output and gradients with those of two products and a softmax."""
    (y, grads), (expected, slopes) = (run(attend, *case) for attend in (kernel, reference))
    assert_near(y, expected)
    for actual, slope in zip(jax.tree.leaves(grads), jax.tree.leaves(slopes), strict=True):
        assert_near(actual, slope)


def compare_shared(kernel, name):
    """As `compare`, of four heads of which two share keys each, against keys that are repeated."""
    (_, k, v, _), mask, real = make(name)
    q = draw(6, *real.shape, 2 * N, D)
    twice = lambda x: jnp.repeat(x, 2, axis=2)
    repeated = lambda q, k, v, *rest: plainly(q, twice(k), twice(v), *rest)
    compare(kernel, ((q, k, v, None), mask, real), repeated)


SHARED = ("left", "odd, prefix", "causal, prefix", "causal documents", "several blocks, causal")


@pytest.fixture
def interpreted(monkeypatch):
    """Lets kernels of Pallas run as plain operations."""
    inner = pallas.pallas_call
    call = lambda *args, **how: inner(*args, **how | {"interpret": True})
    monkeypatch.setattr(pallas, "pallas_call", call)
    jax.clear_caches()  # of programs that were traced for a TPU
    yield
    jax.clear_caches()


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_tpus_kernel(name, interpreted):
    compare(tpu.pallas_attention, make(name))


@pytest.mark.default_cases("several blocks")
@pytest.mark.parametrize("name", ["bias, causal", "bias a row, prefix", "several blocks"])
def test_tpus_kernel_with_a_frozen_bias(name, interpreted, monkeypatch):
    """Its backward pass is not JAX's. Blocks of 128 are several already here."""
    monkeypatch.setattr(tpu, "_BLOCK_SIZES", (128,))
    monkeypatch.setattr(flash_attention, "_flash_attention_bwd_dq", None)

    def with_frozen_bias(kernel):
        return lambda q, k, v, mask, bias, scale: kernel(
            q, k, v, mask, jax.lax.stop_gradient(bias), scale
        )

    compare(with_frozen_bias(tpu.pallas_attention), make(name), with_frozen_bias(plainly))


@pytest.mark.default_cases("left")
@pytest.mark.parametrize("name", SHARED)
def test_tpus_kernel_where_heads_share_keys(name, interpreted):
    compare_shared(tpu.pallas_attention, name)


# Tokens, prefix, columns of the window, prefix outside of it, cap, heads, local, causal.
WINDOWS = {
    "narrow": (40, 0, 7, False, 0.0, N, True, True),
    "prefix in it": (37, 5, 9, False, 0.0, N, True, True),
    "prefix outside": (37, 5, 9, True, 0.0, N, True, True),
    "several blocks": (300, 70, 130, False, 0.0, N, True, True),
    "several blocks, outside": (300, 70, 130, True, 0.0, N, True, True),
    "shared keys, capped": (200, 3, 20, False, 2.0, 2 * N, True, True),
    "all is seen": (37, 5, 9, False, 2.0, N, False, True),
    "to both sides": (300, 0, 65, False, 0.0, N, True, False),
    "to both sides, prefix outside": (37, 5, 9, True, 0.0, N, True, False),
    "all is seen, on both sides": (37, 5, 9, True, 0.0, N, False, False),
}


def make_windowed(length, front, heads, causal=True):
    """Makes q, k, v and no bias, which keys are seen without a window, and the real queries."""
    tokens = tokens_of(4, length)
    q, k, v = (draw(i, 4, length, n, D) for i, n in enumerate((heads, N, N)))
    visible = causal_mask(tokens) if causal else bidirectional_mask(tokens, tokens)
    if front:
        prefix = Prefix(draw(3, 1, front, N, D), draw(4, 1, front, N, D), None)
        k, v, visible = prepend_prefix(prefix, k, v, visible)
    return (q, k, v, None), visible, tokens.mask


def windowed_keys(length, front, columns, out, local):
    """Lists which columns are in the window of each query. -> bool [T, P+T]"""
    place, column = front + np.arange(length)[:, None], np.arange(front + length)
    return (abs(column - place) < columns) | (column < front * out) | (not local)


@pytest.mark.default_cases("shared keys, capped-True")
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_tpus_kernel_of_windows(name, traced, interpreted):
    length, front, columns, out, cap, heads, local, causal = WINDOWS[name]
    (q, k, v, _), visible, real = make_windowed(length, front, heads, causal=causal)
    near = windowed_keys(length, front, columns, out, local)
    mask = (visible.mask if causal else visible.mask[:, None]) & near

    def by_window(q, k, v, visible, bias, scale):
        # In a scan, as a layer of one kind among others is.
        def pick(local):
            window = AttentionWindow(columns, local, front * out)
            mask = visible._replace(window=window)
            return tpu.pallas_attention(q, k, v, mask, bias, scale, cap)

        if not traced:
            return pick(local)
        return jax.lax.scan(lambda _, x: (None, pick(x)), None, jnp.array([local]))[1][0]

    def by_mask(q, k, v, visible, bias, scale):
        k, v = (jnp.repeat(x, heads // N, axis=2) for x in (k, v))
        return attend(q, k, v, AttentionMask(mask), bias, scale=scale, cap=cap, kernel="einsum")

    compare(by_window, ((q, k, v, None), visible, real), by_mask)


@pytest.mark.parametrize("bias, taken", [(None, ["pallas"]), (1.0, ["recompute"])])
def test_a_bias_beside_a_window_leaves_the_kernel_out(bias, taken, monkeypatch):
    """Splash attention takes no bias, and flash attention knows no window."""
    (q, k, v, _), mask, _ = make("causal")
    mask = mask._replace(window=AttentionWindow(7, True))
    chosen, inner = [], kernels.choose_kernel

    def choose(*args, **how):
        chosen.append(inner("fused", TPU, **how))
        return "einsum"

    monkeypatch.setattr(kernels, "choose_kernel", choose)
    attend(q, k, v, mask, None if bias is None else jnp.full((1, N, 40, 40), bias))
    assert chosen == taken


@pytest.fixture
def described(monkeypatch):
    """Lets JAX's own description of attention answer for cuDNN, at even lengths alone."""
    inner, calls = jax.nn.dot_product_attention, []

    def answer(q, k, v, *, implementation, **how):
        assert implementation == "cudnn" and q.shape[1] % 2 == k.shape[1] % 2 == 0
        assert how["bias"] is None or how["bias"].dtype == q.dtype
        calls.append(how)
        lengths = how.get("key_value_seq_lengths")
        assert lengths is None or lengths.dtype == jnp.int32
        return inner(q, k, v, implementation="xla", **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", answer)
    return calls


@pytest.mark.parametrize("name", CASES)
def test_gpus_kernel(name, described):
    compare(cudnn.cudnn_attention, make(name))
    length, front, causal, segments, biased, left = CASES[name]
    by_mask = left or segments
    (how,) = described[:1]
    assert (how["bias"] is not None) == bool(by_mask or biased)
    assert (how["key_value_seq_lengths"] is None) == by_mask
    assert how["is_causal"] == (causal and not by_mask)


@pytest.mark.parametrize("name", SHARED)
def test_gpus_kernel_where_heads_share_keys(name, described):
    compare_shared(cudnn.cudnn_attention, name)
    assert described


CUDNN_WINDOWS = ("narrow", "prefix in it", "prefix outside", "several blocks", "all is seen")


@pytest.mark.default_cases("prefix in it", "prefix outside")
@pytest.mark.parametrize("name", CUDNN_WINDOWS)
def test_gpus_kernel_of_windows(name, described):
    """Also where padding has windows without keys; a prefix outside of all windows is a bias."""
    length, front, columns, out, _, _, local, _ = WINDOWS[name]
    (q, k, v, _), visible, real = make_windowed(length, front, N)
    window = AttentionWindow(columns, np.bool_(local), front * out)
    near = windowed_keys(length, front, columns, out, local)
    by_window = lambda q, k, v, mask, *rest: cudnn.cudnn_attention(
        q, k, v, mask._replace(mask=mask.mask & near, window=window), *rest
    )
    by_mask = lambda q, k, v, mask, *rest: plainly(
        q, k, v, mask._replace(mask=mask.mask & near), *rest
    )
    compare(by_window, ((q, k, v, None), visible, real), by_mask)
    (how,) = described[:1]
    assert (how["bias"] is not None) == out
    assert how["local_window_size"] == (None if out or not local else (columns - 1, 0))


@pytest.fixture
def on_a_gpu():
    """Skips where JAX has no GPU that cuDNN's kernel is for: JAX_PLATFORMS=cuda,cpu names it."""
    (device, *_) = jax.devices()
    if device.platform != "gpu" or float(device.compute_capability) < 8:
        pytest.skip("needs a GPU of capability 8.0 or above")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gpus_kernel_on_a_gpu(name, on_a_gpu):
    compare(cudnn.cudnn_attention, make(name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHARED)
def test_gpus_kernel_on_a_gpu_where_heads_share_keys(name, on_a_gpu):
    compare_shared(cudnn.cudnn_attention, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "odd, prefix", "left", "causal, prefix", "bias"])
def test_gpus_kernel_on_a_gpu_over_runs(name, on_a_gpu):
    (q, k, v, bias), mask, real = make(name)
    more = draw(7, 2, *q.shape)

    place = dataclasses.replace(make_placement(devices=jax.devices()[:1]), maps_runs=True)

    def over(kernel):
        one = lambda x: kernel(q + x, k, v, mask, bias, D**-0.5)
        return np.float32(jax.jit(with_placement(place, jax.vmap(one)))(more))

    assert_near(over(cudnn.cudnn_attention)[:, real], over(plainly)[:, real])


def test_rows_of_no_keys_stay_finite(described, interpreted):
    """Filling of a batch: what it gives is never read, but NaN would spread."""
    q, k, v = (draw(i, 2, 8, N, D) for i in range(3))
    none = AttentionMask(
        jnp.zeros((2, 8), bool), jnp.zeros((2, 8), bool), lengths=jnp.zeros(2, jnp.int32)
    )
    for mask in (none, none._replace(lengths=None)):
        assert np.isfinite(np.float32(cudnn.cudnn_attention(q, k, v, mask, None, 1.0))).all()
    assert np.isfinite(np.float32(tpu.pallas_attention(q, k, v, none, None, 1.0))).all()


def test_mapped_over_runs_every_array_has_the_axis_in_front():
    """Also those that all runs share: a rule of cuDNN's for jax.vmap."""
    shapes = []

    @jax.custom_batching.custom_vmap
    def kernel(x, y):
        return x + y

    @kernel.def_vmap
    def _(size, is_mapped, x, y):
        shapes.append((is_mapped, x.shape, y.shape))
        return x + y, True

    def one(x, y):
        x, y = cudnn._batch_all((x, y))
        return kernel(x, y).sum()

    x, y = jnp.arange(6.0).reshape(2, 3), jnp.ones(3)
    grads = jax.vmap(jax.grad(lambda x, y: (cudnn._batch_all((x, y))[0] * y).sum()), (0, None))
    np.testing.assert_array_equal(grads(x, y), np.ones((2, 3)))
    actual = jax.vmap(one, (0, None))(x, y)
    np.testing.assert_array_equal(actual, (x + 1).sum(1))
    assert shapes == [([True, True], (2, 3), (2, 3))]


def test_padding_makes_blocks_large():
    lengths = (128, 200, 512, 532, 700, 1024, 1044, 2048, 2068, 4116)
    padded = [length + tpu._padding(length) for length in lengths]
    assert padded == [128, 256, 512, 640, 768, 1024, 1280, 2048, 2560, 4480]
    assert [tpu._block(n) for n in padded] == [128, 256, 512, 640, 384, 512, 640, 512, 640, 640]


def test_blocks_divide():
    for length in range(128, 2049, 128):
        assert length % tpu._block(length) == 0
    assert functools.reduce(max, map(tpu._block, (512, 640, 1024))) == 640
