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
    num_exact = buckets // 2
    # On the host: at the edge of a bucket the logarithm of a device may be rounded differently.
    distances = np.arange(max_distance + 1)
    # At least 1, to avoid log(0): short distances have exact buckets.
    ratio = np.log(np.maximum(distances, 1).astype(np.float32) / num_exact)
    ratio = ratio / math.log(max_distance / num_exact)
    # Truncated, not rounded, and in float32, as transformers computes it.
    log_bucket = num_exact + (ratio * (buckets - num_exact)).astype(np.int32)
    log_bucket = np.minimum(log_bucket, buckets - 1)
    by_distance = np.where(distances < num_exact, distances, log_bucket)
    return first + jnp.asarray(by_distance)[jnp.minimum(distance, max_distance)]


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
        buckets = distance_buckets(
            distance, buckets=self.buckets, max_distance=self.max_distance, both_ways=self.both_ways
        )
        # Float32 even where the table is frozen in bfloat16: it is added to float32 scores.
        bias = self.table.astype(jnp.float32)[buckets]  # [B|1, T, S, N]
        bias = jnp.where((keys >= 0)[:, None, :, None], bias, 0.0)
        return bias.transpose(0, 3, 1, 2)


def without_prefix(bias, k):
    """Removes a prefix's columns from the bias of a layer that has none. [.., P+S] -> [.., S]"""
    return bias if bias is None else bias[..., bias.shape[-1] - k.shape[1] :]


def with_prefix(bias, k):
    """Adds a bias of 0 for the columns of a layer's prefix. [.., S] -> [.., P+S]"""
    if bias is None:
        return None
    return jnp.pad(bias, [(0, 0)] * 3 + [(k.shape[1] - bias.shape[-1], 0)])


def select_bias(positions, bias):
    """Selects the bias of queries. [B, M] or None, [B|1, N, T, S] or None -> [B, N, M, S]"""
    if positions is None or bias is None:
        return bias
    bias = jnp.broadcast_to(bias, (len(positions), *bias.shape[1:]))
    return jnp.take_along_axis(bias, positions[:, None, :, None], axis=2)
