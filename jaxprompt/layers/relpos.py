"""T5's relative position bias (Raffel et al. 2020, section 2.1)."""

import math

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.types import Array


def distance_buckets(distance, *, buckets: int, max_distance: int, both_ways: bool):
    """Assigns distances, key minus query, to buckets: small ones exact, then logarithmic.

    int [...] -> int [...] in [0, buckets). With `both_ways`, half of the buckets are for keys after
    the query; otherwise such keys share bucket 0.
    """
    first: Array = 0
    if both_ways:
        buckets //= 2
        first = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    # On the host: at the edge of a bucket a device's logarithm may round to the other side.
    steps = np.arange(max_distance + 1)  # log(0) is left out; the exact buckets stand there
    ratio = np.log(np.maximum(steps, 1).astype(np.float32) / exact) / math.log(max_distance / exact)
    # Truncated, not rounded, and in float32, as transformers computes it.
    far = exact + (ratio * (buckets - exact)).astype(np.int32)
    rows = np.where(steps < exact, steps, np.minimum(far, buckets - 1))
    return first + jnp.asarray(rows)[jnp.minimum(distance, max_distance)]


class RelativeBias(nn.Module):
    """A trained scalar for each head and bucket of distances."""

    buckets: int
    max_distance: int
    heads: int
    both_ways: bool

    def setup(self):
        """Declares the table."""
        self.table = self.param("table", nn.initializers.normal(1.0), (self.buckets, self.heads))

    def __call__(self, queries, keys):
        """Looks up the bias of positions. int [B|1, T], int [B|1, S] -> float32 [B|1, N, T, S]

        A key at position -1 has no bias: 0.
        """
        distance = keys[:, None, :] - queries[:, :, None]  # [B|1, T, S]
        rows = distance_buckets(
            distance, buckets=self.buckets, max_distance=self.max_distance, both_ways=self.both_ways
        )
        # Float32 even where the table is frozen in bfloat16: it is added to float32 scores.
        found = self.table.astype(jnp.float32)[rows]  # [B|1, T, S, N]
        found = jnp.where((keys >= 0)[:, None, :, None], found, 0.0)
        return found.transpose(0, 3, 1, 2)


def without_prefix(bias, k):
    """Removes a prefix's columns from the bias of a layer that has none. [.., P+S] -> [.., S]"""
    return bias if bias is None else bias[..., bias.shape[-1] - k.shape[1] :]


def select_bias(reads, bias):
    """Selects the bias of queries at `reads`, or of all. [B, M], [B|1, N, T, S] -> [B, N, M, S]"""
    if reads is None:
        return bias
    bias = jnp.broadcast_to(bias, (len(reads), *bias.shape[1:]))
    return jnp.take_along_axis(bias, reads[:, None, :, None], axis=2)
