"""JAX's splash and flash attention (Pallas), for TPUs."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt.layers.kernels import fused_scope
from jaxprompt.layers.recompute import instantiate_zeros, recompute
from jaxprompt.parallel import sharding
from jaxprompt.types import AttentionMask, AttentionWindow

_BLOCK_SIZES = (640, 512, 384, 256, 128)  # of queries or keys; divides lengths
_LANES, _SUBLANES = 128, 8  # of a register


def pallas_attention(q, k, v, mask: AttentionMask, bias, scale: float, cap: float = 0.0):
    """Attends with a TPU kernel of JAX; `mask.keys` is required.

    [B, T, N, D], [B, S, N|G, D] x 2, bias [B|1, N, T, S] -> [B, T, N, D]. Splash attention supports
    everything but a bias, which flash attention supports.
    """
    assert mask.keys is not None  # see `choose_kernel`
    batch, queries, heads, size = q.shape
    keys = k.shape[1]
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


def _flash(q, k, v, query_segments, key_segments, bias, *, causal: bool):
    """Attends row by row, so that rows share a bias. [B, N, T, D], [B, N, S, D] x 2, ..."""
    attend = _flash_rows(causal)

    def attend_row(q, k, v, query_segments, key_segments, bias):
        return attend(*(x[None] for x in (q, k, v, bias, query_segments, key_segments)))[0]

    shares_bias = len(bias) == 1
    bias = bias[0] if shares_bias else bias
    return jax.vmap(attend_row, in_axes=(0, 0, 0, 0, 0, None if shares_bias else 0))(
        q, k, v, query_segments, key_segments, bias
    )


def _flash_rows(causal: bool) -> Callable:
    """Returns flash attention whose backward pass writes no array as large as the scores.

    JAX's writes the gradient of every bias, and copies a float32 [B, N, T] for each key of a block,
    of which its kernel reads 128.
    """
    # Only TPUs need this import.
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    def run(q, k, v, bias, segments):
        blocks = _flash_blocks(pallas, q, k)
        return pallas.flash_attention(q, k, v, bias, segments, causal=causal, block_sizes=blocks)

    @jax.custom_vjp
    def attend(q, k, v, bias, query_segments, key_segments):
        return run(q, k, v, bias, pallas.SegmentIds(query_segments, key_segments))

    def forward(*args):
        q, k, v, bias, *segments = [arg.value for arg in args]
        segments = pallas.SegmentIds(*segments)
        if args[3].perturbed:
            return jax.vjp(lambda q, k, v, bias: run(q, k, v, bias, segments), q, k, v, bias)
        blocks = _flash_blocks(pallas, q, k)
        y, sums, maxima = pallas._flash_attention(
            q, k, v, bias, segments, True, causal, 1.0, blocks, False
        )
        residuals = q, k, v, bias, segments, y, sums, maxima
        return y, jax.tree_util.Partial(functools.partial(_flash_grads, causal), *residuals)

    def backward(vjp, g):
        grads = vjp(instantiate_zeros(g))
        return *grads, *[None] * (6 - len(grads))

    attend.defvjp(forward, backward, symbolic_zeros=True)
    return attend


def _flash_grads(causal: bool, q, k, v, bias, segments, y, sums, maxima, g):
    """Returns the gradients of q, k and v."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    (batch, heads, queries, size), keys = q.shape, k.shape[2]
    q_block, kv_block = _block(queries), _block(keys)
    # Of each query, the sum over keys of a probability times its gradient.
    total = jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)
    dk, dv = pallas._flash_attention_bwd_dkv(
        *(q, k, v, bias, segments, sums, maxima, g, total),
        block_q_major=q_block,
        block_q=q_block,
        block_k_major=kv_block,
        block_k=kv_block,
        sm_scale=1.0,
        causal=causal,
    )
    # A grid of rows, heads, blocks of queries and blocks of keys.
    of_queries = pl.BlockSpec((1, 1, q_block, size), lambda row, head, i, j: (row, head, i, 0))
    of_keys = pl.BlockSpec((1, 1, kv_block, size), lambda row, head, i, j: (row, head, j, 0))
    of_both = pl.BlockSpec((1, 1, q_block, kv_block), lambda row, head, i, j: (row, head, i, j))
    of_lanes = pl.BlockSpec((1, 1, q_block, _LANES), lambda row, head, i, j: (row, head, i, 0))
    query_ids = pl.BlockSpec((1, q_block, _LANES), lambda row, head, i, j: (row, i, 0))
    key_ids = pl.BlockSpec((1, _SUBLANES, kv_block), lambda row, head, i, j: (row, 0, j))
    repeat = lambda x: jnp.broadcast_to(x[..., None], (*x.shape, _LANES))
    dq, _ = pl.pallas_call(
        functools.partial(
            pallas._flash_attention_dq_kernel,
            sm_scale=1.0,
            causal=causal,
            mask_value=pallas.DEFAULT_MASK_VALUE,
            kv_seq_len=keys,
            block_k=kv_block,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(batch, heads, queries // q_block, keys // kv_block),
            in_specs=[
                *(of_queries, of_keys, of_keys, of_both, query_ids, key_ids),
                *(of_lanes, of_lanes, of_queries, of_lanes),
            ],
            out_specs=[of_queries, None],
            scratch_shapes=[pltpu.VMEM((q_block, size), jnp.float32)],
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), None],  # None: the bias's gradient
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
    )(
        *(q, k, v, bias, repeat(segments.q)),
        jnp.broadcast_to(segments.kv[:, None], (batch, _SUBLANES, keys)),
        *(repeat(sums), repeat(maxima), g, repeat(total)),
    )
    return dq, dk, dv


def _flash_blocks(pallas, q, k):
    q_block, kv_block = (_block(x.shape[2]) for x in (q, k))
    return pallas.BlockSizes(
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
