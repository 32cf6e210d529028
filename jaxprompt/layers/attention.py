"""Attention with a prefix, and masks."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxprompt.layers import kernels
from jaxprompt.layers.capping import soft_cap
from jaxprompt.layers.dropout import apply_keep_mask, sample_keep_mask
from jaxprompt.layers.kernels import cudnn, tpu
from jaxprompt.layers.product import cast_matrix, dot_general, einsum, promote_dtype
from jaxprompt.layers.recompute import recompute
from jaxprompt.parallel import sharding
from jaxprompt.types import Array, AttentionMask, LayerCache, Prefix, Tokens

PROBABILITIES = "probabilities"  # the name of a softmax for the policies of layers/stack.py


def attend(
    q,
    k,
    v,
    mask: AttentionMask,
    bias=None,
    *,
    scale=None,
    cap=0.0,
    sinks=None,
    kernel="auto",
    dropout=0.0,
    key=None,
):
    """Attends from q over k, v. [B, T, N, D], [B, S, N, D] x 2 -> [B, T, N, D]

    The softmax is float32. A query whose keys are all masked attends uniformly, so that padding
    stays finite.

    Args:
      q: queries.
      k, v: keys and values; with G < N heads, each serves N / G query heads, in order.
      mask: the mask.
      bias: [B|1, N, T, S], added to the scores.
      scale: of the scores; 1 / sqrt(D) by default.
      cap: c > 0 replaces a score x by c tanh(x / c).
      sinks: [N], the score of one more key of each head, whose value is 0 (Xiao et al. 2024). No
        kernel supports them: `kernel` must be "einsum".
      kernel: see `kernels.choose_kernel`.
      dropout: the dropout rate of the probabilities.
      key: turns dropout on.
    """
    has_dropout = dropout > 0.0 and key is not None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernel = "einsum" if mask.few_queries else kernel  # the scores of few queries are small
    has_key_mask = mask.keys is not None and (bias is None or not (mask.window or cap))
    shape = q.shape
    # Each device has the keys that its heads need.
    if k.shape[2] % sharding.num_shards("act_heads"):
        k, v = (_repeat_key_heads(x, shape[2]) for x in (k, v))
    implementation = kernels.choose_kernel(
        kernel,
        sharding.current_target(),
        dtype=q.dtype,
        head_dim=q.shape[-1],
        has_dropout=has_dropout,
        length=q.shape[1],
        has_key_mask=has_key_mask,
        has_cap=cap > 0,
    )
    if implementation == "cudnn":
        return cudnn.cudnn_attention(q, k, v, mask, bias, scale)
    if implementation == "pallas":
        return tpu.pallas_attention(q, k, v, mask, bias, scale, cap)
    visible, key_heads = kernels.score_mask(mask), k.shape[2]
    if key_heads < shape[2]:  # query heads that share keys become additional queries
        q = _fold_query_heads(q, key_heads)
        visible = _repeat_mask(visible, shape[2] // key_heads)

    probabilities = functools.partial(_probabilities, scale=scale, cap=cap, sinks=sinks)

    def weighted_sum(v, *inputs):
        return einsum("bnts,bsnd->btnd", probabilities(*inputs), v)

    def dropped_sum(probs, keep_mask, v):
        return einsum("bnts,bsnd->btnd", apply_keep_mask(probs, keep_mask, dropout), v)

    if has_dropout:
        probs = probabilities(q, k, visible, bias)
        keep_mask = sample_keep_mask(probs.shape, dropout, key)
        # Of the arrays as large as the scores only these two are stored for the backward pass.
        y = recompute(dropped_sum, probs, keep_mask, v)
    elif implementation == "recompute":
        with kernels.fused_scope(mask.causal and mask.lengths is not None):
            y = recompute(weighted_sum, v, q, k, visible, bias)
    else:
        y = weighted_sum(v, q, k, visible, bias)
    return _unfold_query_heads(y, shape)


def _fold_query_heads(q, heads: int):
    """Concatenates the queries of heads that share keys. [B, T, N, D] -> [B, T * N / G, G, D]"""
    batch, length, _, size = q.shape
    grouped = q.reshape(batch, length, heads, -1, size).swapaxes(2, 3)
    return grouped.reshape(batch, -1, heads, size)


def _unfold_query_heads(y, shape: tuple[int, ...]):
    """Undoes `_fold_query_heads`. -> [B, T, N, D]"""
    if y.shape == shape:
        return y
    batch, length, heads, size = shape
    return y.reshape(batch, length, -1, y.shape[2], size).swapaxes(2, 3).reshape(shape)


def _repeat_key_heads(x, heads: int):
    """Repeats shared keys for each query head. [B, S, G, D] -> [B, S, N, D]

    By a product: the gradient of jnp.repeat would gather all heads on every device.
    """
    # Query head n uses key head n // (N / G), as in transformers' repeat_kv.
    head_map = jnp.repeat(jnp.eye(x.shape[2], dtype=x.dtype), heads // x.shape[2], axis=1)
    repeated = jnp.einsum("bsgd,gn->bsnd", x, head_map, precision=jax.lax.Precision.HIGHEST)
    return sharding.constrain(repeated, "act_batch", None, "act_heads", None)


def _repeat_mask(mask, times: int):
    """Repeats each query's row of a mask for the folded heads. [B, 1, 1|T, S]"""
    return mask if mask.shape[2] == 1 else jnp.repeat(mask, times, axis=2)


def _probabilities(q, k, mask, bias, scale, cap=0.0, sinks=None):
    """Computes the softmax of the scores. [B, T, N, D], [B, S, N, D] -> [B, N, T, S]

    All heads share keys [B, S, D].
    """
    equation = "btnd,bsnd->bnts" if k.ndim == 4 else "btnd,bsd->bnts"
    # q is scaled and not the scores, which are larger.
    scores = einsum(equation, q if scale == 1.0 else q * scale, k, jnp.float32)
    # Capped before the mask: a tanh would bring the mask's minimum back to -cap.
    scores = soft_cap(scores, cap)
    # The lowest finite number: with -inf a row without visible keys would be NaN.
    scores = scores + jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)
    if bias is not None:
        scores = scores + bias
    return _softmax_with_sinks(scores, sinks, q.dtype)


def _softmax_with_sinks(scores, sinks, dtype):
    """Computes the softmax over the keys and a sink, which is then left out. [B, G, T, S]

    sinks: [N] or None; T are the queries of the N / G heads that share keys.
    """
    if sinks is None:
        return softmax(scores, dtype)
    # Query heads that share keys are neighbours among the folded queries.
    grouped = sinks.astype(scores.dtype).reshape(scores.shape[1], -1)
    repeated = jnp.tile(grouped, scores.shape[2] // grouped.shape[1])[None, :, :, None]
    column = jnp.broadcast_to(repeated, (*scores.shape[:3], 1))
    return softmax(jnp.concatenate([scores, column], axis=-1), dtype)[..., :-1]


def attend_cached(q, cache: LayerCache, mask, bias=None, *, scale=None, cap=0.0, sinks=None):
    """Attends from one token of each beam over cached keys and values. -> [B*K, N, D]

    Args:
      q: queries, [B*K, N, D]; the K beams of a row share its keys and values.
      cache: keys and values; they may have fewer heads, as in `attend`.
      mask: True = seen, bool [B, K|1, S].
      bias: [B, N, 1, S], added to the scores; every head needs keys of its own.
      scale: of the scores; 1 / sqrt(D) by default.
      cap: as in `attend`.
      sinks: as in `attend`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    shape, (rows, heads, _, _) = q.shape, cache.k.shape
    beam_queries = (q * scale).reshape(rows, -1, *shape[1:])  # [B, K, N, D]
    queries = _fold_query_heads(beam_queries, heads)
    scores = einsum("bjnd,bnsd->bnjs", queries, cache.k, jnp.float32)
    mask = _repeat_mask(mask[:, None], shape[1] // heads)
    # Capped before the mask, as in `_probabilities`.
    scores = soft_cap(scores, cap) + jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)
    if bias is not None:
        scores = scores + bias
    probs = _softmax_with_sinks(scores, sinks, q.dtype)  # [B, N, J, S]
    y = jnp.einsum("bnjs,bnsd->bjnd", probs, cache.v)
    return _unfold_query_heads(y, beam_queries.shape).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def softmax(x, dtype=jnp.float32):
    """Computes the softmax over the last axis in float32, and casts it. [...] -> [...]"""
    return jax.nn.softmax(x, axis=-1).astype(dtype)


def _softmax_forward(x, dtype):
    y = checkpoint_name(softmax(x, dtype), PROBABILITIES)
    return y, y


def _softmax_backward(dtype, y, g):
    y, g = y.astype(jnp.float32), g.astype(jnp.float32)
    weighted = y * g
    return (weighted - y * weighted.sum(-1, keepdims=True),)


# Only the cast result is stored for the backward pass; automatic differentiation would store the
# exponentials in float32.
softmax.defvjp(_softmax_forward, _softmax_backward)


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
    out_bias: bool | None = None  # None = `use_bias`
    key_heads: int = 0
    cap: float = 0.0  # of the scores, see `attend`
    has_sinks: bool = False  # see `attend`

    def setup(self):
        """Declares the projections."""
        dense = functools.partial(
            nn.DenseGeneral,
            dtype=self.dtype,
            dot_general=dot_general,
            promote_dtype=promote_dtype,
        )
        shape, bias = (self.heads, self.head_dim), self.use_bias
        key_shape = (self.key_heads or self.heads, self.head_dim)
        self.query = dense(shape, use_bias=bias)
        self.key, self.value = dense(key_shape, use_bias=bias), dense(key_shape, use_bias=bias)
        out_bias = bias if self.out_bias is None else self.out_bias
        self.out = dense(self.width, axis=(-2, -1), use_bias=out_bias)
        if self.has_sinks:
            self.sinks = self.param("sinks", nn.initializers.zeros, (self.heads,))

    def attend_and_project(self, q, k, v, mask: AttentionMask, bias=None, *, deterministic: bool):
        """Attends from queries. [B, T, N, D], [B, S, N, D] x 2 -> [B, T, H]"""
        has_dropout = self.dropout > 0.0 and not deterministic
        key = self.make_rng("dropout") if has_dropout else None
        # A stack's layers are initialised under jax.vmap, which not every kernel supports.
        kernel = "einsum" if self.is_initializing() else self.kernel
        y = attend(
            q,
            k,
            v,
            mask,
            bias,
            scale=self.scale,
            cap=self.cap,
            sinks=self._sinks(),
            kernel=kernel,
            dropout=self.dropout,
            key=key,
        )
        return self.out(y)

    def probabilities(self, q, k, mask: AttentionMask, bias=None):
        """Computes the softmax of the scores. [B, T, N, D], [B, S, N, D] -> [B, N, T, S]

        All heads share keys [B, S, D].
        """
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        if k.ndim == 4 and k.shape[2] < q.shape[2]:
            # Not folded as in `attend`, so that the probabilities of each head are returned.
            k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        return _probabilities(q, k, kernels.score_mask(mask), bias, scale, self.cap, self._sinks())

    def _sinks(self):
        return self.sinks if self.has_sinks else None

    def attend_cached(self, x, cache: LayerCache, mask, bias=None):
        """Attends from one token of each beam over cached keys and values. [B*K, H] -> [B*K, H]"""
        return self.attend_cached_queries(self.query(x), cache, mask, bias)

    def attend_cached_queries(self, q, cache: LayerCache, mask, bias=None):
        """Attends from one query of each beam, see `attend_cached`. [B*K, N, D] -> [B*K, H]"""
        options = dict(scale=self.scale, cap=self.cap, sinks=self._sinks())
        return self.out(attend_cached(q, cache, mask, bias, **options))


class Attention(MultiHead):
    """Multi-head attention over given keys and values."""

    def keys(self, x):
        """Projects keys and values. [B, S, H] -> k, v [B, S, N, D]"""
        return self.key(x), self.value(x)

    def __call__(self, x, k, v, mask: AttentionMask, bias=None, *, deterministic: bool):
        """Attends from x. [B, T, H], [B, S, N, D] x 2 -> [B, T, H]"""
        return self.attend_and_project(self.query(x), k, v, mask, bias, deterministic=deterministic)

    def is_faster_without_keys(self, queries: int, keys: int) -> bool:
        """Returns whether `attend_to_source` needs fewer FLOPs than keys and values would.

        Per head and text, keys and values cost 4 S H D forward and as many backward, if they are
        frozen; `attend_to_source` costs 4 T H (S + D) forward and up to twice as many backward.
        """
        if self.is_initializing() or not (isinstance(queries, int) and isinstance(keys, int)):
            return False  # parameters are declared, or the program is for any length
        return 2 * queries < min(self.head_dim, keys)

    def attend_to_source(self, x, source, mask: AttentionMask, *, deterministic: bool):
        """Attends over the keys and values of a source without computing them.

        Equals `__call__` with `keys(source)`: scores q (s W_k)^T = (q W_k^T) s^T, and outputs
        p (s W_v) = (p s) W_v. [B, T, H], [B, S, H] -> [B, T, H]
        """
        has_dropout = self.dropout > 0.0 and not deterministic

        def weighted_sum(probs, source, keep_mask=None):
            probs = probs if keep_mask is None else apply_keep_mask(probs, keep_mask, self.dropout)
            mix = einsum("bnts,bsh->btnh", probs, source)
            return mix, probs.sum(-1).swapaxes(1, 2) if self.use_bias else None

        key_params, value_params = (part.variables["params"] for part in (self.key, self.value))
        q = einsum("btnd,hnd->btnh", self.query(x), cast_matrix(key_params["kernel"], self.dtype))
        probs = self.probabilities(q, source, mask)
        if has_dropout:
            keep_mask = sample_keep_mask(probs.shape, self.dropout, self.make_rng("dropout"))
            mix, totals = recompute(weighted_sum, probs, source, keep_mask)
        else:
            mix, totals = weighted_sum(probs, source)
        y = einsum("btnh,hnd->btnd", mix, cast_matrix(value_params["kernel"], self.dtype))
        # A bias of keys adds the same to all scores of a query, and the softmax does not change.
        if self.use_bias:
            y = y + totals[..., None] * value_params["bias"].astype(self.dtype)
        return self.out(y)

    def attention_weights(self, x, k, mask: AttentionMask, bias=None):
        """Returns the probabilities that `__call__` weights the values with, for any kernel.

        [B, T, H], [B, S, N, D] -> [B, N, T, S]
        """
        return self.probabilities(self.query(x), k, mask, bias)


def prepend_prefix(prefix: Prefix | None, k, v, mask: AttentionMask):
    """Joins the prefix of one layer with the keys, values and mask of the text.

    [B|1, P, N, D] x 2 and bool [B|1, P] or None, [B, T, N, D] x 2 -> [B, P+S, N, D] x 2, the mask
    """
    if prefix is None:
        return k, v, mask
    rows, length = k.shape[0], prefix.k.shape[1]
    broadcast = functools.partial(jnp.broadcast_to, shape=(rows, *prefix.k.shape[1:]))
    # Trained parameters are float32, and would promote the keys of the text. They are cast after
    # the broadcast, so that their gradient is summed over the batch in float32.
    k = jnp.concatenate([broadcast(prefix.k).astype(k.dtype), k], axis=1)
    v = jnp.concatenate([broadcast(prefix.v).astype(v.dtype), v], axis=1)
    prefix_mask = jnp.ones((1, length), bool) if prefix.mask is None else prefix.mask
    prefix_mask = jnp.broadcast_to(prefix_mask, (rows, length))

    def prepend(mask_part):
        if mask_part is None:
            return None
        prefix_part = prefix_mask if mask_part.ndim == 2 else prefix_mask[:, None]
        return jnp.concatenate(
            [jnp.broadcast_to(prefix_part, (*mask_part.shape[:-1], length)), mask_part], axis=-1
        )

    # After a masked column the visible keys are no longer the first ones.
    has_lengths = prefix.mask is None and mask.lengths is not None
    mask = mask._replace(
        mask=prepend(mask.mask),
        # A prefix belongs to no document: with several, only `mask` says that all see it.
        keys=None if mask.segments else prepend(mask.keys),
        segments=None,
        lengths=mask.lengths + length if has_lengths else None,
    )
    return k, v, mask


def select_queries(positions, mask: AttentionMask, *states):
    """Selects the queries at `positions`: int [B, M], or None for all of them.

    States are trees of [B, T, ...]. -> AttentionMask, states [B, M, ...]
    """
    if positions is None:
        return mask, *states
    selected = mask.mask
    if selected.ndim == 3:
        selected = jnp.broadcast_to(selected, (len(positions), *selected.shape[1:]))
        selected = jnp.take_along_axis(selected, positions[..., None], axis=1)  # [B, M, S]

    # The other fields of `AttentionMask` describe all queries, in order.
    def select(leaf):
        return jnp.take_along_axis(leaf, jnp.expand_dims(positions, range(2, leaf.ndim)), 1)

    return AttentionMask(selected, few_queries=True), *jax.tree.map(select, states)


def bidirectional_mask(queries: Tokens, keys: Tokens) -> AttentionMask:
    """Returns the mask by which each token sees the real tokens of its document."""
    if queries.segments is None:
        return AttentionMask(keys.mask, keys.mask, lengths=keys.lengths)
    segments: tuple[Array, Array] = queries.segments, keys.segments
    # Padding is document 0 on both sides, so the keys' mask has to hide it.
    same_segment = segments[0][:, :, None] == segments[1][:, None, :]  # [B, T, S]
    # Without lengths, which would not describe the visible keys.
    return AttentionMask(same_segment & keys.mask[:, None, :], keys.mask, segments=segments)


def causal_mask(tokens: Tokens) -> AttentionMask:
    """Returns the causal mask: real tokens of the same document, in branch 0 or the same branch."""
    columns = jnp.arange(tokens.mask.shape[1])
    is_earlier = columns[:, None] >= columns  # [T, T]
    mask = bidirectional_mask(tokens, tokens)
    # By columns, not by positions, which several tokens may share.
    visible = is_earlier & (
        mask.mask[:, None, :] if mask.mask.ndim == 2 else mask.mask
    )  # [B, T, T]
    # With lengths there are no branches, see `Tokens`.
    if tokens.lengths is not None:
        return mask._replace(mask=visible, causal=True)
    branch = tokens.types
    same_branch = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    return AttentionMask(visible & same_branch)
