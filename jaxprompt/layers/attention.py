"""Attention with a prefix, and masks."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.layers import kernels
from jaxprompt.layers.capping import soft_cap
from jaxprompt.layers.dropout import apply_keep_mask, sample_keep_mask
from jaxprompt.layers.product import dot_general, einsum
from jaxprompt.layers.recompute import recompute
from jaxprompt.parallel import sharding
from jaxprompt.types import AttentionMask, LayerCache, Prefix, Tokens


def attend(
    q, k, v, seen: AttentionMask, bias=None, *, scale=None, cap=0.0, kernel="auto", dropout=0.0,
    key=None,
):  # fmt: skip
    """Attends from q over k, v. [B, T, N, D], [B, S, N, D] x 2 -> [B, T, N, D]

    The softmax is float32. A query whose keys are all masked attends uniformly, so that padding
    stays finite.

    Args:
      q: queries.
      k: keys; with fewer heads, [B, S, G, D], each serves N / G query heads, in order.
      v: values, like k.
      seen: the mask.
      bias: [B|1, N, T, S], added to the scores.
      scale: of the scores; 1 / sqrt(D) by default.
      cap: c > 0 replaces a score x by c tanh(x / c).
      kernel: see layers/kernels.py.
      dropout: the dropout rate of the probabilities.
      key: turns dropout on.
    """
    dropped = dropout > 0.0 and key is not None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernel = "einsum" if seen.few_queries else kernel  # the scores of few queries are small
    told = seen.keys is not None and (bias is None or not (seen.window or cap))
    shape = q.shape
    if k.shape[2] % sharding.num_shards(
        "act_heads"
    ):  # each device has the keys that its heads need
        k, v = (_spread_heads(x, shape[2]) for x in (k, v))
    chosen = kernels.choose_kernel(
        kernel, sharding.current_target(), dtype=q.dtype, head_dim=q.shape[-1], dropped=dropped,
        length=q.shape[1], told=told, capped=cap > 0,
    )  # fmt: skip
    if chosen == "cudnn":
        return kernels.cudnn_attention(q, k, v, seen, bias, scale)
    if chosen == "pallas":
        return kernels.pallas_attention(q, k, v, seen, bias, scale, cap)
    mask, heads = _spread(seen), k.shape[2]
    if heads < shape[2]:  # the heads that share keys are rows more of these
        q, mask = _fold(q, heads), _repeat(mask, shape[2] // heads)
    weigh = lambda q, k, mask, bias: _probabilities(q, k, mask, bias, scale, cap)
    if not dropped:
        mix = lambda v, *given: einsum("bnts,bsnd->btnd", weigh(*given), v)
        given = v, q, k, mask, bias
        return _unfold(recompute(mix, *given) if chosen == "recompute" else mix(*given), shape)
    probs = weigh(q, k, mask, bias)
    keep = sample_keep_mask(probs.shape, dropout, key)
    # Of what has the size of the scores, `probs` and `keep` alone are kept for the backward pass.
    thinned = lambda p, keep, v: einsum("bnts,bsnd->btnd", apply_keep_mask(p, keep, dropout), v)
    return _unfold(recompute(thinned, probs, keep, v), shape)


def _fold(q, heads: int):
    """Lays heads that share keys behind one another. [B, T, N, D] -> [B, T * N / G, G, D]"""
    rows, length, _, size = q.shape
    grouped = q.reshape(rows, length, heads, -1, size).swapaxes(2, 3)
    return grouped.reshape(rows, -1, heads, size)


def _unfold(y, shape: tuple[int, ...]):
    """Undoes `_fold`. -> [B, T, N, D]"""
    if y.shape == shape:
        return y
    rows, length, heads, size = shape
    return y.reshape(rows, length, -1, y.shape[2], size).swapaxes(2, 3).reshape(shape)


def _spread_heads(x, heads: int):
    """Gives each head the keys that it shares. [B, S, G, D] -> [B, S, N, D]

    By a product: the gradient of a repetition would gather all heads on every device.
    """
    # Head n reads the keys of head n // (N / G), as transformers' repeat_kv lays them out.
    own = jnp.repeat(jnp.eye(x.shape[2], dtype=x.dtype), heads // x.shape[2], axis=1)
    spread = jnp.einsum("bsgd,gn->bsnd", x, own, precision=jax.lax.Precision.HIGHEST)
    return sharding.constrain(spread, "act_batch", None, "act_heads", None)


def _repeat(mask, times: int):
    """Gives each query's row of a mask to the heads that are folded. [B, 1, 1|T, S]"""
    return mask if mask.shape[2] == 1 else jnp.repeat(mask, times, axis=2)


def _probabilities(q, k, seen, bias, scale, cap=0.0):
    """Computes the softmax of the scores. [B, T, N, D], [B, S, N, D] -> [B, N, T, S]"""
    # q is scaled and not the scores, which are an array more to pass over.
    scores = einsum("btnd,bsnd->bnts", q if scale == 1.0 else q * scale, k, jnp.float32)
    # Capped before the mask: a tanh would bring the mask's minimum back to -cap.
    scores = soft_cap(scores, cap)
    # The least finite number: with -inf a row that sees nothing would be NaN.
    scores = scores + jnp.where(seen, 0.0, jnp.finfo(jnp.float32).min)
    if bias is not None:
        scores = scores + bias
    return softmax(scores, q.dtype)


def _spread(seen: AttentionMask):
    """Gives a mask the axes of scores. -> [B, 1, 1|T, S]"""
    return seen.mask[:, None, None] if seen.mask.ndim == 2 else seen.mask[:, None]


def attend_cached(q, memory: LayerCache, bias=None, *, scale=None, cap=0.0):
    """Attends from one token of each row over the cached keys and values. [R, N, D] -> [R, N, D]

    The memory has R rows, or B < R: then R / B consecutive rows share one. It may have fewer heads,
    as in `attend`. bias: [R, N, S].
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    shape, (_, heads, columns, _) = q.shape, memory.k.shape
    num_beams = (q * scale).reshape(memory.k.shape[0], -1, *shape[1:])  # R -> B, J
    folded = _fold(num_beams, heads)
    scores = einsum("bjnd,bnsd->bnjs", folded, memory.k, jnp.float32)
    hidden = jnp.where(memory.mask, 0.0, jnp.finfo(jnp.float32).min)
    # As in `_probabilities`: capped first, masked then.
    scores = soft_cap(scores, cap) + hidden[:, None, None]
    if bias is not None:
        scores = scores + bias.reshape(len(memory.k), -1, heads, columns).swapaxes(1, 2)
    probs = softmax(scores, q.dtype)  # [B, N, J, S]
    y = jnp.einsum("bnjs,bnsd->bjnd", probs, memory.v)
    return _unfold(y, num_beams.shape).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def softmax(x, dtype=jnp.float32):
    """Computes the softmax over the last axis in float32, and casts it. [...] -> [...]"""
    return jax.nn.softmax(x, axis=-1).astype(dtype)


def _softmax(x, dtype):
    y = softmax(x, dtype)
    return y, y


def _softmax_gradient(dtype, y, g):
    y, g = y.astype(jnp.float32), g.astype(jnp.float32)
    part = y * g
    return (part - y * part.sum(-1, keepdims=True),)


# The cast result alone is kept for the backward pass: automatic differentiation keeps the
# exponentials, in float32.
softmax.defvjp(_softmax, _softmax_gradient)


class MultiHead(nn.Module):
    """The projections that all multi-head attention shares.

    `scale` None is 1 / sqrt(D). T5 has neither scale nor biases, and N * D may differ from `width`.
    `key_heads` is the number of key-value heads (Ainslie et al. 2023); 0 = one per query head.
    """

    width: int
    heads: int
    head_dim: int
    dropout: float = 0.0
    kernel: str = "auto"
    dtype: jnp.dtype = jnp.float32
    scale: float | None = None
    use_bias: bool = True
    out_bias: bool | None = None  # None = as `use_bias`
    key_heads: int = 0
    cap: float = 0.0  # of the scores, see `attend`

    def setup(self):
        """Declares the projections."""
        dense = functools.partial(nn.DenseGeneral, dtype=self.dtype, dot_general=dot_general)
        shape, bias = (self.heads, self.head_dim), self.use_bias
        of_keys = (self.key_heads or self.heads, self.head_dim)
        self.query = dense(shape, use_bias=bias)
        self.key, self.value = dense(of_keys, use_bias=bias), dense(of_keys, use_bias=bias)
        behind = bias if self.out_bias is None else self.out_bias
        self.out = dense(self.width, axis=(-2, -1), use_bias=behind)

    def mix(self, q, k, v, seen: AttentionMask, bias=None, *, deterministic: bool):
        """Attends from queries. [B, T, N, D], [B, S, N, D] x 2 -> [B, T, H]"""
        drops = self.dropout > 0.0 and not deterministic
        key = self.make_rng("dropout") if drops else None
        # A stack's layers are initialised under jax.vmap, which not every kernel takes.
        kernel = "einsum" if self.is_initializing() else self.kernel
        y = attend(
            q, k, v, seen, bias, scale=self.scale, cap=self.cap, kernel=kernel,
            dropout=self.dropout, key=key,
        )  # fmt: skip
        return self.out(y)

    def probabilities(self, q, k, seen: AttentionMask, bias=None):
        """Computes the softmax of the scores. [B, T, N, D], [B, S, N, D] -> [B, N, T, S]"""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        if k.shape[2] < q.shape[2]:
            # Not folded as in `attend`: each head has probabilities of its own to look at.
            k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        return _probabilities(q, k, _spread(seen), bias, scale, self.cap)

    def recall(self, x, memory: LayerCache, bias=None):
        """Attends from one token of each row over cached keys and values. [R, H] -> [R, H]"""
        return self.recall_from(self.query(x), memory, bias)

    def recall_from(self, q, memory: LayerCache, bias=None):
        """Attends from one query of each row over cached keys and values. [R, N, D] -> [R, H]"""
        return self.out(attend_cached(q, memory, bias, scale=self.scale, cap=self.cap))


class Attention(MultiHead):
    """Multi-head attention over given keys and values."""

    def keys(self, x):
        """Projects keys and values. [B, S, H] -> k, v [B, S, N, D]"""
        return self.key(x), self.value(x)

    def __call__(self, x, k, v, seen: AttentionMask, bias=None, *, deterministic: bool):
        """Attends from x. [B, T, H], [B, S, N, D] x 2 -> [B, T, H]"""
        return self.mix(self.query(x), k, v, seen, bias, deterministic=deterministic)

    def weigh(self, x, k, seen: AttentionMask, bias=None):
        """Returns the probabilities that `__call__` weights the values with, for any kernel.

        [B, T, H], [B, S, N, D] -> [B, N, T, S]
        """
        return self.probabilities(self.query(x), k, seen, bias)


def prepend_prefix(prefix: Prefix | None, k, v, seen: AttentionMask):
    """Joins the prefix of one layer with the keys, values and mask of the text.

    [B|1, P, N, D] x 2 and bool [B|1, P] or None, [B, T, N, D] x 2 -> [B, P+S, N, D] x 2, the mask
    """
    if prefix is None:
        return k, v, seen
    rows, length = k.shape[0], prefix.k.shape[1]
    spread = functools.partial(jnp.broadcast_to, shape=(rows, *prefix.k.shape[1:]))
    # Trained numbers are float32, and would widen the keys of the text with them. Cast once they
    # are spread: so their gradient is summed over the batch in float32.
    k = jnp.concatenate([spread(prefix.k).astype(k.dtype), k], axis=1)
    v = jnp.concatenate([spread(prefix.v).astype(v.dtype), v], axis=1)
    mask = jnp.ones((1, length), bool) if prefix.mask is None else prefix.mask
    front = jnp.broadcast_to(mask, (rows, length))

    def join(own):
        if own is None:
            return None
        wide = front if own.ndim == 2 else front[:, None]
        return jnp.concatenate([jnp.broadcast_to(wide, (*own.shape[:-1], length)), own], axis=-1)

    # With a masked column in front the keys that are seen are no longer the first so many.
    counts = prefix.mask is None and seen.lengths is not None
    seen = seen._replace(
        mask=join(seen.mask),
        # A prefix is of no document: with several a mask alone tells that all see it.
        keys=None if seen.segments else join(seen.keys),
        segments=None,
        lengths=seen.lengths + length if counts else None,
    )
    return k, v, seen


def select_queries(reads, seen: AttentionMask, *states):
    """Selects the queries at `reads`: int [B, M], or None for all of them.

    States are trees of [B, T, ...]. -> AttentionMask, states [B, M, ...]
    """
    if reads is None:
        return seen, *states
    mask = seen.mask
    if mask.ndim == 3:
        mask = jnp.broadcast_to(mask, (len(reads), *mask.shape[1:]))
        mask = jnp.take_along_axis(mask, reads[..., None], axis=1)  # [B, M, S]
    # What else `AttentionMask` tells is of all queries, in their order.
    pick = lambda leaf: jnp.take_along_axis(leaf, jnp.expand_dims(reads, range(2, leaf.ndim)), 1)
    return AttentionMask(mask, few_queries=True), *jax.tree.map(pick, states)


def bidirectional_mask(queries: Tokens, keys: Tokens) -> AttentionMask:
    """Returns the mask by which each token sees the real tokens of its document."""
    own, others = queries.segments, keys.segments
    if own is None and others is None:
        return AttentionMask(keys.mask, keys.mask, lengths=keys.lengths)
    if own is None or others is None:
        raise TypeError("one stream of tokens has segments and the other has none")
    # Padding shares document 0, so the keys' own mask has to hide it.
    same = own[:, :, None] == others[:, None, :]  # [B, T, S]
    # Lengths do not tell which keys are seen.
    return AttentionMask(same & keys.mask[:, None, :], keys.mask, segments=(own, others))


def causal_mask(tokens: Tokens) -> AttentionMask:
    """Returns the causal mask: real tokens of the same document, in branch 0 or the same branch."""
    number = jnp.arange(tokens.mask.shape[1])
    order = number[:, None] >= number  # [T, T]
    own = bidirectional_mask(tokens, tokens)
    # By columns and not by positions, which several tokens may share.
    mask = order & (own.mask[:, None, :] if own.mask.ndim == 2 else own.mask)  # [B, T, T]
    # Where lengths tell the mask no token is of a branch, see `Tokens`.
    if tokens.lengths is not None:
        return own._replace(mask=mask, causal=True)
    branch = tokens.types
    sees = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    return AttentionMask(mask & sees)
