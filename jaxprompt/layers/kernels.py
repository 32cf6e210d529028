"""Attention kernels of cuDNN and JAX: which one is used where, and how it is called.

Two matrix products and a softmax work everywhere. cuDNN's flash attention (GPUs) and JAX's flash
and splash attention (TPUs, Pallas) store no scores, and support only some shapes and masks.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt.layers.recompute import recompute
from jaxprompt.parallel import sharding
from jaxprompt.parallel.roofline import CAUSAL_SCOPE, FUSED_SCOPE
from jaxprompt.parallel.sharding import Target
from jaxprompt.types import AttentionMask, AttentionWindow

KERNELS = ("auto", "einsum", "fused")  # values of a config
MIN_FLASH_LENGTH = 512  # tokens; "auto" uses no TPU kernel for fewer, whose scores are small
_CUDNN_MULTIPLE = 2  # cuDNN's lengths are multiples of it in training
_BLOCK_SIZES = (640, 512, 384, 256, 128)  # of queries or keys in a TPU's kernel; divides lengths


def choose_kernel(
    kernel: str,
    target: Target,
    *,
    dtype,
    head_dim: int,
    has_dropout: bool,
    length: int,
    has_key_mask: bool,
    has_cap: bool = False,
) -> str:
    """Returns the kernel for a config's choice: einsum, recompute, cudnn or pallas.

    "recompute" is "einsum" with scores that are recomputed in the backward pass. `length` counts
    the queries; `has_key_mask` says whether `AttentionMask.keys` and its related fields describe
    the whole mask.
    """
    if kernel == "einsum" or has_dropout:  # kernels have other dropout than layers/dropout.py
        return "einsum"
    supports_heads = jnp.dtype(dtype).itemsize == 2 and head_dim % 8 == 0
    # cuDNN's flash attention supports head dims up to 128 on all GPUs from capability 8.0 on, and
    # up to 256 on Hopper, whose backward pass Blackwell has not. JAX's call of it has no soft cap.
    is_flash_gpu = target.platform == "gpu" and target.capability >= 8
    max_head_dim = 256 if 9 <= target.capability < 10 else 128
    if supports_heads and is_flash_gpu and head_dim <= max_head_dim and not has_cap:
        return "cudnn"
    is_long = length >= MIN_FLASH_LENGTH or kernel == "fused"
    # Above 128 the kernel only supports 256.
    fits_head_dim = head_dim <= 128 or head_dim == 256
    if supports_heads and target.platform == "tpu" and fits_head_dim and has_key_mask and is_long:
        return "pallas"
    return "recompute" if kernel == "fused" else "einsum"


def has_fused_kernel(
    cfg: Any, head_dim: int, target: Target, length: int, *, has_dropout: bool
) -> bool:
    """Returns whether a target has a fused kernel for a backbone's attention over a text."""
    kernel = choose_kernel(
        cfg.attention,
        target,
        dtype=cfg.dtype,
        head_dim=head_dim,
        has_dropout=has_dropout,
        length=length,
        has_key_mask=True,
        has_cap=getattr(cfg, "cap", 0.0) > 0,
    )
    return kernel in ("cudnn", "pallas")


def fused_scope(is_causal: bool):
    """Names the operations that a fused kernel computes, or would, for the estimates of `plan`."""
    return jax.named_scope(CAUSAL_SCOPE if is_causal else FUSED_SCOPE)


def score_mask(mask: AttentionMask):
    """Returns the mask with the axes of scores. -> [B, 1, 1|T, S]"""
    return mask.mask[:, None, None] if mask.mask.ndim == 2 else mask.mask[:, None]


def cudnn_attention(q, k, v, mask: AttentionMask, bias, scale: float):
    """Attends by cuDNN. [B, T, N, D], [B, S, N, D] x 2, bias [B|1, N, T, S] -> [B, T, N, D]"""
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    has_lengths = mask.lengths is not None and _is_cudnn_window(mask.window, bias)
    window_size = None
    if has_lengths and mask.window is not None and mask.window.local:
        window_size = mask.window.columns - 1, 0
    # The kernel aligns causal queries with the first key; queries are added for earlier keys.
    num_earlier = keys - queries if has_lengths and mask.causal else 0
    padding = (num_earlier + queries) % _CUDNN_MULTIPLE, keys % _CUDNN_MULTIPLE
    q = jnp.pad(q, [(0, 0), (num_earlier, padding[0]), (0, 0), (0, 0)])
    # Fewer key heads are passed as they are: cuDNN shares them among the query heads.
    k, v = (jnp.pad(x, [(0, 0), (0, padding[1]), (0, 0), (0, 0)]) for x in (k, v))
    # Much larger values trigger a bug of cuDNN, as a comment in JAX's code says.
    mask_value = -(2.0**41) if q.dtype == jnp.bfloat16 else -(2.0**14)
    lengths = None
    # At least 1: the result of no keys is NaN, for rows that only fill the batch.
    if mask.lengths is not None and has_lengths:
        key_lengths = jnp.maximum(mask.lengths, 1).astype(jnp.int32)
        # The windows of padding may have no keys; beyond the lengths, cuDNN's result is 0.
        lengths = jnp.full(batch, q.shape[1], jnp.int32), key_lengths
        lengths = (key_lengths, key_lengths) if window_size else lengths
    else:
        is_seen = jnp.broadcast_to(score_mask(mask), (batch, 1, queries, keys))
        mask_bias = jnp.where(is_seen, 0.0, mask_value)
        bias = mask_bias if bias is None else bias + mask_bias
    if bias is not None:
        # Padding is below the masked keys, so that a row that sees nothing attends uniformly over
        # real keys. 2 * mask_value is still finite in float16.
        key_padding = [(0, 0), (0, 0), (0, 0), (0, padding[1])]
        bias = jnp.pad(bias.astype(q.dtype), key_padding, constant_values=2 * mask_value)
        bias = jnp.pad(bias, [(0, 0), (0, 0), (0, padding[0]), (0, 0)])
        if sharding.maps_runs():  # the kernel's rule for jax.vmap needs the whole array
            bias = jnp.broadcast_to(bias, (batch, heads, *bias.shape[2:]))

    def attend(q, k, v, bias, lengths):
        q, k, v, bias, lengths = _batch_all((q, k, v, bias, lengths))
        num_queries, num_keys = lengths or (None, None)
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias=bias,
            scale=scale,
            is_causal=has_lengths and mask.causal,
            query_seq_lengths=num_queries,
            key_value_seq_lengths=num_keys,
            local_window_size=window_size,
            implementation="cudnn",
        )

    y = (attend if bias is None else _with_bias(attend))(q, k, v, bias, lengths)
    return y[:, num_earlier : num_earlier + queries]


def _is_cudnn_window(window: AttentionWindow | None, bias) -> bool:
    """Returns whether cuDNN hides the keys outside of a window itself.

    It supports no columns that every query sees, no bias, and no choice when the program runs.
    """
    if window is None:
        return True
    is_static = isinstance(window.local, bool | np.bool_)
    return is_static and not (window.local and (window.num_global or bias is not None))


def _with_bias(attend: Callable) -> Callable:
    """Wraps attend(q, k, v, bias, lengths), whose backward pass writes no unused dbias.

    It is as large as the scores of a batch, and JAX always requests it.
    """

    @jax.custom_vjp
    def wrapped(q, k, v, bias, lengths):
        return attend(q, k, v, bias, lengths)

    def forward(*args):
        trains_bias = args[3].perturbed
        q, k, v, bias, lengths = jax.tree.map(
            lambda arg: arg.value, args, is_leaf=lambda arg: hasattr(arg, "perturbed")
        )
        if trains_bias:
            return jax.vjp(lambda q, k, v, bias: attend(q, k, v, bias, lengths), q, k, v, bias)
        with _without_dbias():
            return jax.vjp(lambda q, k, v: attend(q, k, v, bias, lengths), q, k, v)

    def backward(vjp, g):
        is_zero = isinstance(g, jax.custom_derivatives.SymbolicZero)
        grads = vjp(jnp.zeros(g.shape, g.dtype) if is_zero else g)
        return *grads, *[None] * (5 - len(grads))

    wrapped.defvjp(forward, backward, symbolic_zeros=True)
    return wrapped


_TRACES_DBIAS = threading.RLock()


@contextlib.contextmanager
def _without_dbias() -> Iterator[None]:
    """Traces calls of cuDNN attention whose backward pass returns no gradient of the bias.

    XLA only computes it if the call returns it (openxla/xla#24203). JAX 0.10 has no option for
    that, but asks a function, which an earlier JAX may not have.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    name = "should_export_dbias"
    if not hasattr(fused, name):
        yield
        return
    with _TRACES_DBIAS:
        original = getattr(fused, name)
        setattr(fused, name, lambda *_: False)
        try:
            yield
        finally:
            setattr(fused, name, original)


@jax.custom_vjp
def _batch_all(arrays):
    """Returns its arguments; under jax.vmap all of them have the mapped axis, and have it first.

    cuDNN's rule for jax.vmap needs that.
    """
    return _batch_all_inner(arrays)


@jax.custom_batching.custom_vmap
def _batch_all_inner(arrays):
    return arrays


@_batch_all_inner.def_vmap
def _batch_all_rule(size, is_mapped, arrays):
    def broadcast(x, mapped):
        return x if mapped else jnp.broadcast_to(x, (size, *x.shape))

    return jax.tree.map(broadcast, arrays, *is_mapped), jax.tree.map(lambda _: True, *is_mapped)


_batch_all.defvjp(lambda arrays: (_batch_all_inner(arrays), None), lambda _, grads: (grads,))


def pallas_attention(q, k, v, mask: AttentionMask, bias, scale: float, cap: float = 0.0):
    """Attends with a TPU kernel of JAX; `mask.keys` is required.

    [B, T, N, D], [B, S, N|G, D] x 2, bias [B|1, N, T, S] -> [B, T, N, D]. Splash attention supports
    everything but a bias, which flash attention supports.
    """
    assert mask.keys is not None  # see `choose_kernel`
    batch, queries, heads, size = q.shape
    keys = k.shape[1]
    # Flash attention's backward pass writes a float32 array [B, N, T, block].
    splash = bias is None
    if k.shape[2] < heads and not splash:
        k, v = (jnp.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    # Flash attention aligns causal queries with the first key; queries are added for earlier keys.
    num_earlier = keys - queries if mask.causal and not splash else 0
    padding = _padding(queries + num_earlier), _padding(keys)
    segments = mask.segments or (jnp.ones((batch, queries), jnp.int32), jnp.ones_like(mask.keys))
    # Hidden keys have segment 0, which no query has.
    query_segments = jnp.pad(
        segments[0].astype(jnp.int32), [(0, 0), (num_earlier, padding[0])], constant_values=-1
    )
    key_segments = jnp.pad(
        jnp.where(mask.keys, segments[1], 0).astype(jnp.int32), [(0, 0), (0, padding[1])]
    )
    arrays = [query_segments, key_segments]
    qkv_axes: list[tuple[str | None, ...]] = [("act_batch", "act_heads", None, None)] * 3
    axes: list[tuple[str | None, ...]] = [("act_batch", None)] * 2
    if bias is not None:
        pads = [(0, 0), (0, 0), (num_earlier, padding[0]), (0, padding[1])]
        arrays.append(jnp.pad(bias.astype(q.dtype), pads))
        axes.append(("act_batch" if len(bias) > 1 else None, "act_heads", None, None))
    run_kernel: Callable = functools.partial(_flash, causal=mask.causal)
    if splash:
        run_kernel = functools.partial(_splash, mask=mask, offset=keys - queries, cap=cap)
        if mask.window:
            arrays.append(jnp.asarray(mask.window.local))
            axes.append(())
    # GSPMD cannot partition a Pallas call: each device runs it on its shard.
    run_kernel = sharding.map_shards(run_kernel, qkv_axes + axes)

    def attend(q, k, v, arrays):
        def heads_first(x, *padding):
            x = x.reshape(batch, x.shape[1], -1, size)
            return jnp.pad(x, [(0, 0), padding, (0, 0), (0, 0)]).swapaxes(1, 2)

        q = heads_first(q, num_earlier, padding[0])
        k, v = (heads_first(x, 0, padding[1]) for x in (k, v))
        with fused_scope(mask.causal):
            y = run_kernel(q, k, v, *arrays)
        return y.swapaxes(1, 2)[:, num_earlier : num_earlier + queries]

    def join_heads(x):
        return x.reshape(*x.shape[:2], -1)

    # q is scaled because the kernel would scale the bias too. The backward pass stores q, k and v
    # with joined heads: a head of 64 would be padded to 128, the width of a TPU's registers.
    q = join_heads(q if scale == 1.0 else q * scale)
    return recompute(attend, q, join_heads(k), join_heads(v), tuple(arrays))


def _splash(
    q,
    k,
    v,
    query_segments,
    key_segments,
    local=False,
    *,
    mask: AttentionMask,
    offset: int,
    cap: float,
):
    """Attends row by row, with `offset` keys before those of the causal queries.

    [B, N, T, D], [B, G, S, D] x 2, ..., bool [] -> [B, N, T, D]
    """
    # Only TPUs need this import.
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas

    shape = q.shape[2], k.shape[2]
    q_block, kv_block = map(_block, shape)
    blocks = pallas.BlockSizes(
        block_q=q_block,
        block_kv=kv_block,
        block_q_dkv=q_block,
        block_kv_dkv=kv_block,
        block_q_dq=q_block,
        block_kv_dq=kv_block,
    )

    def attend(pallas_mask):
        kernel = pallas.make_splash_mha_single_device(
            pallas.MultiHeadMask([pallas_mask] * q.shape[1]),
            block_sizes=blocks,
            attn_logits_soft_cap=cap or None,
        )
        return jax.vmap(lambda q, k, v, a, b: kernel(q, k, v, pallas.SegmentIds(a, b)))

    inputs = q, k, v, query_segments, key_segments
    full_mask = pallas.CausalMask(shape, offset) if mask.causal else pallas.FullMask(shape)
    if mask.window is None or mask.window.local is False:
        return attend(full_mask)(*inputs)
    attend_local = attend(_window_mask(pallas, shape, offset, mask.window, causal=mask.causal))
    if mask.window.local is True:
        return attend_local(*inputs)
    return jax.lax.cond(local, attend_local, attend(full_mask), *inputs)


def _window_mask(
    pallas, shape: tuple[int, int], offset: int, window: AttentionWindow, *, causal: bool
):
    num_back = window.columns - 1
    num_ahead = 0 if causal else num_back
    if not window.num_global:
        return pallas.LocalMask(shape, (num_back, num_ahead), offset)

    class Mask(pallas.Mask):
        """Like NumpyMask, whose whole array JAX would hash for each head."""

        @property
        def shape(self):
            return shape

        def __getitem__(self, blocks):
            query, column = (np.arange(n)[i] for n, i in zip(shape, blocks, strict=True))
            query = offset + query[:, None]
            is_near = (query - num_back <= column) & (column <= query + num_ahead)
            return is_near | (column < window.num_global)

        __eq__, __hash__ = object.__eq__, object.__hash__

    return Mask()


def _flash(q, k, v, query_segments, key_segments, bias=None, *, causal: bool):
    """Attends row by row, so that rows share a bias. [B, N, T, D], [B, N, S, D] x 2, ..."""
    # Only TPUs need this import.
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    q_block, kv_block = (_block(x.shape[2]) for x in (q, k))
    blocks = pallas.BlockSizes(
        block_b=1,
        block_q=q_block,
        block_k_major=kv_block,
        block_k=kv_block,
        block_q_major_dkv=q_block,
        block_q_dkv=q_block,
        block_k_major_dkv=kv_block,
        block_k_dkv=kv_block,
        block_q_dq=q_block,
        block_k_major_dq=kv_block,
        block_k_dq=kv_block,
    )

    def attend_row(q, k, v, query_segments, key_segments, bias):
        ids = pallas.SegmentIds(query_segments[None], key_segments[None])
        inputs = q[None], k[None], v[None], None if bias is None else bias[None], ids
        return pallas.flash_attention(*inputs, causal=causal, block_sizes=blocks)[0]

    shares_bias = bias is None or len(bias) == 1
    bias = bias[0] if bias is not None and shares_bias else bias
    return jax.vmap(attend_row, in_axes=(0, 0, 0, 0, 0, None if shares_bias else 0))(
        q, k, v, query_segments, key_segments, bias
    )


def _padding(length: int) -> int:
    """Returns how many queries or keys to add so that large blocks divide them.

    Each block costs about as much as 256 more of them: for 2,068, four blocks of 640 cost less
    than 17 of 128.
    """
    size = min(_BLOCK_SIZES, key=lambda size: -(-length // size) * (size + 256))
    return -length % size


def _block(length: int) -> int:
    """Finds the largest block that divides a multiple of 128."""
    return next(size for size in _BLOCK_SIZES if length % size == 0)
