"""Attention kernels of cuDNN and JAX: which one is used where, and how it is called.

Two matrix products and a softmax work everywhere. cuDNN's flash attention (GPUs) and JAX's flash
and splash attention (TPUs, Pallas) store no scores, and support only some shapes and masks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt.layers.recompute import recompute
from jaxprompt.parallel import sharding
from jaxprompt.parallel.sharding import Target
from jaxprompt.types import AttentionMask, AttentionWindow

KERNELS = ("auto", "einsum", "fused")  # what a config may ask for
MIN_FLASH_LENGTH = (
    512  # tokens from which "auto" takes a TPU's kernel: the scores of fewer are small
)
_EVEN = 2  # what cuDNN's lengths are multiples of in training
_BLOCKS = (640, 512, 384, 256, 128)  # queries or keys that a TPU's kernel takes at a time
_LANES = 128  # what its lengths are multiples of


def choose_kernel(
    kernel: str, target: Target, *, dtype, head_dim: int, dropped: bool, length: int, told: bool,
    capped: bool = False,
) -> str:  # fmt: skip
    """Returns the kernel for a config's choice: einsum, recompute, cudnn or pallas.

    "recompute" is "einsum" with scores that are recomputed in the backward pass. `length` counts
    the queries; `told` says whether the mask is also given as
    `AttentionMask.keys` and its related fields.
    """
    if kernel == "einsum" or dropped:  # no kernel drops as the rest of this code does
        return "einsum"
    narrow = jnp.dtype(dtype).itemsize == 2 and head_dim % 8 == 0
    # cuDNN's flash attention takes heads of up to 128 numbers on every GPU from capability 8.0 on,
    # and JAX's call of it has no cap of scores.
    gpu = target.platform == "gpu" and target.capability >= 8
    if narrow and gpu and head_dim <= 128 and not capped:
        return "cudnn"
    long = length >= MIN_FLASH_LENGTH or kernel == "fused"
    # The kernel takes no other width above 128.
    fits = head_dim <= 128 or head_dim == 256
    if narrow and target.platform == "tpu" and fits and told and long:
        return "pallas"
    return "recompute" if kernel == "fused" else "einsum"


def has_fused_kernel(cfg: Any, head_dim: int, target: Target, length: int, *, drops: bool) -> bool:
    """Returns whether a target has a fused kernel for a backbone's attention over a text."""
    chosen = choose_kernel(
        cfg.attention, target, dtype=cfg.dtype, head_dim=head_dim, dropped=drops, length=length,
        told=True, capped=getattr(cfg, "cap", 0.0) > 0,
    )  # fmt: skip
    return chosen in ("cudnn", "pallas")


def cudnn_attention(q, k, v, seen: AttentionMask, bias, scale: float):
    """Attends by cuDNN. [B, T, N, D], [B, S, N, D] x 2, bias [B|1, N, T, S] -> [B, T, N, D]"""
    (rows, queries, heads, _), keys = q.shape, k.shape[1]
    counts = seen.lengths is not None
    # The kernel lines causal queries up with the first key: what is put in front is not read.
    front = keys - queries if counts and seen.causal else 0
    more = (front + queries) % _EVEN, keys % _EVEN
    q = jnp.pad(q, [(0, 0), (front, more[0]), (0, 0), (0, 0)])
    # Fewer heads of keys pass as they are: cuDNN shares them among the queries' heads.
    k, v = (jnp.pad(x, [(0, 0), (0, more[1]), (0, 0), (0, 0)]) for x in (k, v))
    # Far larger numbers, as JAX says in its own code, meet a fault of cuDNN's.
    low = -(2.0**41) if q.dtype == jnp.bfloat16 else -(2.0**14)
    lengths = None
    if seen.lengths is not None:  # none is 0: of no keys at all comes NaN, in rows of filling
        full, most = jnp.full(rows, q.shape[1]), jnp.maximum(seen.lengths, 1)
        lengths = full.astype(jnp.int32), most.astype(jnp.int32)
    else:
        mask = seen.mask[:, None, None] if seen.mask.ndim == 2 else seen.mask[:, None]
        hidden = jnp.where(jnp.broadcast_to(mask, (rows, 1, queries, keys)), 0.0, low)
        bias = hidden if bias is None else bias + hidden
    if bias is not None:
        # Padding lies below what is masked, so that a row that sees nothing attends evenly over
        # real keys. 2 * low is finite in float16 still.
        bias = jnp.pad(
            bias.astype(q.dtype), [(0, 0), (0, 0), (0, 0), (0, more[1])], constant_values=2 * low
        )
        bias = jnp.pad(bias, [(0, 0), (0, 0), (0, more[0]), (0, 0)])
        if sharding.maps_runs():  # what maps the kernel over runs asks for all of it
            bias = jnp.broadcast_to(bias, (rows, heads, *bias.shape[2:]))
    q, k, v, bias, lengths = _batch_alike((q, k, v, bias, lengths))
    own, others = lengths or (None, None)
    y = jax.nn.dot_product_attention(
        q, k, v, bias=bias, scale=scale, is_causal=counts and seen.causal,
        query_seq_lengths=own, key_value_seq_lengths=others, implementation="cudnn",
    )  # fmt: skip
    return y[:, front : front + queries]


@jax.custom_vjp
def _batch_alike(arrays):
    """Returns arrays as they are, and under jax.vmap all of them with the mapped axis in front.

    cuDNN's rule for jax.vmap asks for that.
    """
    return _alike(arrays)


@jax.custom_batching.custom_vmap
def _alike(arrays):
    return arrays


@_alike.def_vmap
def _map_alike(size, is_mapped, arrays):
    spread = lambda x, mapped: x if mapped else jnp.broadcast_to(x, (size, *x.shape))
    return jax.tree.map(spread, arrays, *is_mapped), jax.tree.map(lambda _: True, *is_mapped)


_batch_alike.defvjp(lambda arrays: (_alike(arrays), None), lambda _, given: (given,))


def pallas_attention(q, k, v, seen: AttentionMask, bias, scale: float, cap: float = 0.0):
    """Attends with a TPU kernel of JAX; `seen.keys` is required.

    [B, T, N, D], [B, S, N|G, D] x 2, bias [B|1, N, T, S] -> [B, T, N, D]. Splash attention supports
    windows, soft caps and shared key heads; flash attention supports a bias.
    """
    if seen.keys is None:
        raise ValueError("the kernel needs AttentionMask.keys, which is None; see `choose_kernel`")
    rows, queries, heads, size = q.shape
    keys = k.shape[1]
    splash = bias is None and bool(seen.window or cap or k.shape[2] < heads)
    if k.shape[2] < heads and not splash:
        k, v = (jnp.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    # Flash attention lines causal queries up with the first key: what is put in front is not read.
    front = keys - queries if seen.causal and not splash else 0
    ends = -(queries + front) % _LANES, -keys % _LANES
    segments = seen.segments or (jnp.ones((rows, queries), jnp.int32), jnp.ones_like(seen.keys))
    # Number 0 is that of hidden keys, which no query has.
    own = jnp.pad(segments[0].astype(jnp.int32), [(0, 0), (front, ends[0])], constant_values=-1)
    others = jnp.pad(jnp.where(seen.keys, segments[1], 0).astype(jnp.int32), [(0, 0), (0, ends[1])])
    arrays = [own, others]
    axes: list[tuple[str | None, ...]] = [("act_batch", None)] * 2
    if bias is not None:
        pads = [(0, 0), (0, 0), (front, ends[0]), (0, ends[1])]
        arrays.append(jnp.pad(bias.astype(q.dtype), pads))
        axes.append(("act_batch" if len(bias) > 1 else None, "act_heads", None, None))
    run: Callable = functools.partial(_flash, causal=seen.causal)
    if splash:
        run = functools.partial(_splash, seen=seen, before=keys - queries, cap=cap)
        if seen.window:
            arrays.append(jnp.asarray(seen.window.local))
            axes.append(())
    # GSPMD cannot divide a Pallas call: each device runs it on its own part.
    run = sharding.map_shards(run, [*[("act_batch", "act_heads", None, None)] * 3, *axes])

    def attend(q, k, v, arrays):
        def lay(x, *ends):
            x = x.reshape(rows, x.shape[1], -1, size)
            return jnp.pad(x, [(0, 0), ends, (0, 0), (0, 0)]).swapaxes(1, 2)

        y = run(lay(q, front, ends[0]), lay(k, 0, ends[1]), lay(v, 0, ends[1]), *arrays)
        return y.swapaxes(1, 2)[:, front : front + queries]

    join = lambda x: x.reshape(*x.shape[:2], -1)
    # The kernel would scale the bias too. Of q, k and v with heads joined is kept: a head's own 64
    # numbers would take the room of 128, the width of a TPU's registers.
    return recompute(
        attend, join(q if scale == 1.0 else q * scale), join(k), join(v), tuple(arrays)
    )


def _splash(q, k, v, own, others, local=False, *, seen: AttentionMask, before: int, cap: float):
    """Attends row by row, with `before` keys in front of causal queries' own.

    [B, N, T, D], [B, G, S, D] x 2, ..., bool [] -> [B, N, T, D]
    """
    # Imported where a TPU needs it, and nowhere else.
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas

    shape = q.shape[2], k.shape[2]
    rows, columns = map(_block, shape)
    blocks = pallas.BlockSizes(
        block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns, block_q_dq=rows,
        block_kv_dq=columns,
    )  # fmt: skip

    def attend(mask):
        kernel = pallas.make_splash_mha_single_device(
            pallas.MultiHeadMask([mask] * q.shape[1]), block_sizes=blocks,
            attn_logits_soft_cap=cap or None,
        )  # fmt: skip
        return jax.vmap(lambda q, k, v, a, b: kernel(q, k, v, pallas.SegmentIds(a, b)))

    given = q, k, v, own, others
    whole = pallas.CausalMask(shape, before) if seen.causal else pallas.FullMask(shape)
    if seen.window is None or seen.window.local is False:
        return attend(whole)(*given)
    near = attend(_window_mask(pallas, shape, before, seen.window, causal=seen.causal))
    if seen.window.local is True:
        return near(*given)
    return jax.lax.cond(local, near, attend(whole), *given)


def _window_mask(
    pallas, shape: tuple[int, int], before: int, window: AttentionWindow, *, causal: bool
):  # fmt: skip
    back = window.columns - 1
    ahead = 0 if causal else back
    if not window.num_global:
        return pallas.LocalMask(shape, (back, ahead), before)

    class Mask(pallas.Mask):
        """As NumpyMask, of which JAX would hash the whole array for each head."""

        @property
        def shape(self):
            return shape

        def __getitem__(self, blocks):
            place, column = (np.arange(n)[i] for n, i in zip(shape, blocks, strict=True))
            place = before + place[:, None]
            near = (place - back <= column) & (column <= place + ahead)
            return near | (column < window.num_global)

        __eq__, __hash__ = object.__eq__, object.__hash__

    return Mask()


def _flash(q, k, v, own, others, bias=None, *, causal: bool):
    """Attends row by row, so that rows share a bias. [B, N, T, D], [B, N, S, D] x 2, ..."""
    # Imported where a TPU needs it, and nowhere else.
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    rows, columns = (_block(x.shape[2]) for x in (q, k))
    blocks = pallas.BlockSizes(
        block_b=1, block_q=rows, block_k_major=columns, block_k=columns,
        block_q_major_dkv=rows, block_q_dkv=rows, block_k_major_dkv=columns, block_k_dkv=columns,
        block_q_dq=rows, block_k_major_dq=columns, block_k_dq=columns,
    )  # fmt: skip

    def one(q, k, v, own, others, bias):
        ids = pallas.SegmentIds(own[None], others[None])
        given = q[None], k[None], v[None], None if bias is None else bias[None], ids
        return pallas.flash_attention(*given, causal=causal, block_sizes=blocks)[0]

    shared = bias is None or len(bias) == 1
    bias = bias[0] if bias is not None and shared else bias
    return jax.vmap(one, in_axes=(0, 0, 0, 0, 0, None if shared else 0))(q, k, v, own, others, bias)


def _block(length: int) -> int:
    """Finds the largest block that divides a multiple of 128."""
    return next(size for size in _BLOCKS if length % size == 0)
