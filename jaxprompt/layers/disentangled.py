"""DeBERTa's disentangled attention: scores by content and by distance (He et al. 2021).

With q, k of the content and r of a distance, row d of the relative position embeddings for query i
and key j with d = i - j, the score is q_i k_j + q_i kr_d (c2p) + k_j qr_d (p2c), divided by
sqrt(D * (1 + the number of distance terms)). A prefix has no distance: it is scored by content
alone, with the same divisor (Liu et al. 2022, P-tuning v2's code).
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.layers.attention import Attention
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.product import dot_general, einsum, promote_dtype
from jaxprompt.layers.reading import select_positions
from jaxprompt.types import AttentionMask


@functools.cache
def distance_rows(length: int, span: int, buckets: int, limit: int) -> np.ndarray:
    """Returns the row of the table for each distance, key j to query i. -> int [2 * length]

    Entry e is for d = i - j = length - 1 - e; the last is padding. With `buckets`, distances are
    exact up to half of them and then logarithmic up to `limit`.
    """
    distance = np.minimum(np.arange(length - 1, -length - 1, -1), length - 1)
    if buckets > 0:
        num_exact = buckets // 2
        # At least `num_exact`: the logarithm of 0 would be computed, though it is not used.
        magnitude = np.maximum(np.abs(distance), num_exact).astype(np.float32)
        # In float32 as in transformers: at the edge of a bucket float64 rounds differently.
        log_limit = np.log(np.float32((limit - 1) / num_exact))
        log_distance = np.log(magnitude / np.float32(num_exact)) / log_limit
        log_distance = np.ceil(log_distance * np.float32(num_exact - 1)) + num_exact
        is_exact = np.abs(distance) <= num_exact
        distance = np.where(is_exact, distance, np.sign(distance) * log_distance).astype(np.int64)
    return np.clip(distance + span, 0, 2 * span - 1)


def align_by_distance(scores, positions=None):
    """Moves scores of distances to their keys. [B, N, T, 2T] -> [B, N, T, T]

    In row i, entry e becomes that of key e - (T - 1) + i. Reading rows of 2T as rows of 2T - 1
    shifts each row by one: no gather, whose gradient on GPUs is not deterministic. With `positions`
    [B, M] there are only the rows of these positions i, [B, N, M, 2T] -> [B, N, M, T].
    """
    if positions is not None:
        length = scores.shape[-1] // 2
        # No entry is taken twice in a row, so the gradient adds nothing up in any order.
        entries = length - 1 - positions[..., None] + jnp.arange(length)  # [B, M, T]
        return jnp.take_along_axis(scores, entries[:, None], axis=-1)
    *batch_dims, length, width = scores.shape
    flat_scores = scores.reshape(*batch_dims, length * width)
    flat_scores = flat_scores[..., length - 1 : length - 1 + length * (width - 1)]
    return flat_scores.reshape(*batch_dims, length, width - 1)[..., :length]


class _JointProjection(nn.Module):
    """One kernel of queries, keys and values, head by head. [..., H] -> [..., N, D]"""

    heads: int
    head_dim: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, part: int):
        """Applies one of its three parts."""
        shape = (x.shape[-1], self.heads, 3, self.head_dim)
        kernel = self.param("kernel", nn.initializers.normal(0.02), shape)[:, :, part]
        x, kernel, _ = promote_dtype(x, kernel, None, dtype=self.dtype)
        return dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


class _HeadBias(nn.Module):
    """Adds a bias to every head. [..., N, D] -> [..., N, D]"""

    @nn.compact
    def __call__(self, x):
        """Adds it."""
        return x + self.param("bias", nn.initializers.zeros, x.shape[-2:]).astype(x.dtype)


class Disentangled(Attention):
    """Attention with additional distance terms.

    `terms` are "c2p" and "p2c". v1 has joint projections in one kernel (`joined`), v2 can project
    distances like contents (`shared`). `span`, `buckets` and `limit` as in `distance_rows`.
    """

    terms: tuple[str, ...] = ()
    joined: bool = False
    shared: bool = False
    span: int = 0
    buckets: int = -1
    limit: int = 0
    hidden_dropout: float = 0.0

    def setup(self):
        """Declares the projections."""
        dense = functools.partial(
            nn.DenseGeneral,
            dtype=self.dtype,
            dot_general=dot_general,
            promote_dtype=promote_dtype,
        )
        shape = (self.heads, self.head_dim)
        if self.joined:
            self.in_proj = _JointProjection(*shape, self.dtype)
            self.query, self.value = _HeadBias(), _HeadBias()
        else:
            self.query, self.key, self.value = dense(shape), dense(shape), dense(shape)
        if self.span and not self.shared:
            if "c2p" in self.terms:
                # In transformers v1's pos_proj has no bias and its pos_q_proj has one.
                self.position_key = dense(shape, use_bias=not self.joined)
            if "p2c" in self.terms:
                self.position_query = dense(shape)
        self.out = dense(self.width, axis=(-2, -1))
        self.drop = Dropout(self.hidden_dropout)

    def keys(self, x):
        """Projects keys and values. [B, S, H] -> k, v [B, S, N, D]"""
        if self.joined:
            # v1 has biases of queries and values, but not of keys.
            return self.in_proj(x, 1), self.value(self.in_proj(x, 2))
        return self.key(x), self.value(x)

    def __call__(
        self,
        x,
        k,
        v,
        mask: AttentionMask,
        relative=None,
        positions=None,
        *,
        queries=None,
        deterministic: bool,
    ):
        """Attends from x; the last T keys belong to x, those before them to a prefix.

        [B, T, H], [B, S, N, D] x 2, the relative position embeddings [R, H] or None -> [B, T, H].
        With `positions`, int [B, M], only from these positions of x, as in `mask` -> [B, M, H].
        `queries` replace x at those positions.
        """
        if queries is None:
            queries = x if positions is None else select_positions(x, positions)
        q = self._queries(queries)
        if relative is not None:
            # transformers' pos_dropout, which every layer samples again.
            relative = self.drop(relative, deterministic=deterministic)
        bias = self._bias(q, k, relative, x.shape[1], positions)
        return self.attend_and_project(q, k, v, mask, bias, deterministic=deterministic)

    def attention_weights(self, x, k, mask: AttentionMask, relative=None, positions=None):
        """Returns the probabilities that `__call__` weights the values with. -> [B, N, T, S]"""
        q = self._queries(x if positions is None else select_positions(x, positions))
        return self.probabilities(q, k, mask, self._bias(q, k, relative, x.shape[1], positions))

    def _queries(self, x):
        return self.query(self.in_proj(x, 0)) if self.joined else self.query(x)

    def _bias(self, q, k, relative, length: int, positions=None):
        """Scores by distance. [B, T, N, D], [B, P+T, N, D], [R, H] -> [B, N, T, P+T], 0 at P

        With `positions` [B, M] q and the result are only at these positions of the text.
        """
        if relative is None or not self.terms:
            return None
        prefix_length = k.shape[1] - length
        rows = distance_rows(length, self.span, self.buckets, self.limit)
        # The divisor counts all terms, since each adds variance to the score.
        scale, bias = 1 / math.sqrt(self.head_dim * (1 + len(self.terms))), 0.0
        if "c2p" in self.terms:
            table = (self.key if self.shared else self.position_key)(relative[rows])  # [2T, N, D]
            # q is scaled here, as `attend` scales it for the content's term.
            scores = einsum("btnd,end->bnte", q * scale, table, jnp.float32)
            bias = align_by_distance(scores, positions)
        if "p2c" in self.terms:
            # For the keys the order of distances is reversed.
            project = self.query if self.shared else self.position_query
            table = project(relative[_reverse_distances(rows)])
            scores = einsum("bsnd,end->bnse", k[:, prefix_length:] * scale, table, jnp.float32)
            p2c_scores = align_by_distance(scores).swapaxes(2, 3)  # [B, N, T, T]
            if positions is not None:
                p2c_scores = jnp.take_along_axis(p2c_scores, positions[:, None, :, None], axis=2)
            bias = bias + p2c_scores
        return jnp.pad(bias, [(0, 0)] * 3 + [(prefix_length, 0)])


def _reverse_distances(rows: np.ndarray) -> np.ndarray:
    """Reverses the order of distances; the last row is padding."""
    return np.append(rows[-2::-1], rows[-1])
