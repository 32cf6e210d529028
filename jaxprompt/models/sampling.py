"""Sampling of the next token: what changes its scores, and one random key per row.

A row's key is derived from the seed, the example and the sample, and folded with the number of the
token. So a text does not depend on the batch, the padding or the mesh.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt import rng
from jaxprompt.errors import InputError, at_least
from jaxprompt.types import Array, SharedPrefix, Tokens


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is chosen by its scores, see `filter_scores` and `penalize_repetition`."""

    temperature: float = 0.0  # 0 = the token with the best score
    top_k: int = 0  # 0 = all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def check(self) -> None:
        """Raises InputError for a value out of range."""
        at_least("temperature", self.temperature, 0)
        at_least("top_k", self.top_k, 0)
        for name, is_valid, limit in (
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
        ):
            if not is_valid:
                raise InputError(f"{name}={getattr(self, name)} must be {limit}")


class RowKeys(NamedTuple):
    """What the random keys of the rows of a pass are derived from."""

    seed: Array  # uint32 [2], key data
    first: Array  # int32 scalar, number of the pass's first example in the whole input
    num_samples: Array  # int32 scalar, adjacent rows that are samples of one example


def make_row_keys(seed: int, first: int = 0, num_samples: int = 1) -> RowKeys:
    """Returns the origin of the keys of a pass, see `RowKeys`."""
    key = jax.random.key_data(rng.key_for(seed, "generate"))
    return RowKeys(np.asarray(key), np.int32(first), np.int32(num_samples))


def derive_keys(keys: RowKeys, index: Array) -> Array:
    """Derives the key of each row. `index`: its number in the pass, int32 [B] -> uint32 [B, 2]"""
    seed = rng.from_key_data(keys.seed)

    def derive(number: Array) -> Array:
        key = jax.random.fold_in(seed, keys.first + number // keys.num_samples)
        return jax.random.key_data(jax.random.fold_in(key, number % keys.num_samples))

    return jax.vmap(derive)(jnp.asarray(index))


def read_tokens(tokens: Tokens, prefix: SharedPrefix | None, vocab: int) -> Array:
    """Marks the tokens of the vocabulary that each row contains, without soft tokens and padding.

    Returns:
      bool [B, V].
    """
    ids = jnp.asarray(tokens.ids)
    is_word = jnp.asarray(tokens.mask) & (jnp.asarray(tokens.slot) < 0)  # [B, T]
    rows = jnp.arange(len(ids))[:, None]
    seen = jnp.zeros((len(ids), vocab), bool).at[rows, ids].max(is_word)
    words = [] if prefix is None else [i for i, s in zip(*prefix[:2], strict=True) if s < 0]
    return seen.at[:, jnp.array(words, int)].set(True) if words else seen


def penalize_repetition(scores: Array, seen: Array, penalty: float) -> Array:
    """Divides positive scores of tokens that occurred by a penalty, and multiplies negative ones.

    Keskar et al. 2019, CTRL, section 4.1. float32 [B, V], bool [B, V] -> float32 [B, V]
    """
    return jnp.where(seen, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


def filter_scores(scores: Array, sampling: Sampling) -> Array:
    """Divides scores by the temperature, and removes improbable tokens, as transformers does.

    In this order: `top_k` keeps the k best tokens; `top_p` the fewest of these whose probabilities
    sum to p (Holtzman et al. 2020, section 3.1); `min_p` those with at least that share of the best
    token's probability (Nguyen et al. 2024). Equal scores are kept or removed together.

    Args:
      scores: float32 [B, V].
      sampling: with a temperature above 0.

    Returns:
      Scores, -inf = removed.
    """
    scores = scores / sampling.temperature
    best = scores.max(-1, keepdims=True)
    distances = best - scores  # [B, V], at least 0
    candidates = distances
    if 0 < sampling.top_k < scores.shape[-1]:
        candidates = best - jax.lax.top_k(scores, sampling.top_k)[0]  # [B, k]
        scores = jnp.where(distances > candidates[:, -1:], -jnp.inf, scores)
    if sampling.top_p < 1:
        limit = _nucleus_limit(candidates, sampling.top_p)  # [B, 1]
        scores = jnp.where(distances > limit, -jnp.inf, scores)
    if sampling.min_p > 0:
        scores = jnp.where(distances > -math.log(sampling.min_p), -jnp.inf, scores)
    return scores


def _nucleus_limit(distances: Array, top_p: float) -> Array:
    """Returns the smallest distance from the best score within which the probability is `top_p`.

    By bisection over the bits of floats, which is exact and faster than sorting the vocabulary.
    float32 [B, N] -> [B, 1]
    """
    weights = jnp.exp(-distances)
    enough = top_p * weights.sum(-1, keepdims=True)
    # Floats from 0 on are in the order of their bits.
    bits = jax.lax.bitcast_convert_type(distances, jnp.int32)
    infinite = int(np.float32(np.inf).view(np.int32))

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # too little probability, enough
        middle = low + (high - low) // 2
        is_enough = jnp.where(bits <= middle, weights, 0).sum(-1, keepdims=True) >= enough
        return jnp.where(is_enough, low, middle), jnp.where(is_enough, middle, high)

    shape = len(distances), 1
    bounds = jnp.full(shape, -1, jnp.int32), jnp.full(shape, infinite, jnp.int32)
    _, limit = jax.lax.fori_loop(0, 31, halve, bounds)
    return jax.lax.bitcast_convert_type(limit, jnp.float32)


def draw_tokens(keys: Array, steps: Array, scores: Array) -> Array:
    """Draws a token of each row with probability softmax(scores).

    First a block of the vocabulary, then a token of it: only some hundred random numbers per row.

    Args:
      keys: of rows, uint32 [B, 2].
      steps: tokens of each row before this one, int32 [B].
      scores: float32 [B, V], without the padding of a mesh, or the blocks would be others.

    Returns:
      Token ids, int32 [B].
    """
    rows, vocab = scores.shape
    width = math.isqrt(vocab)
    padding = [(0, 0), (0, -vocab % width)]
    blocks = jnp.pad(scores, padding, constant_values=-jnp.inf).reshape(rows, -1, width)

    def draw(key_data: Array, step: Array, blocks: Array, block_scores: Array) -> Array:
        key = rng.at_step(rng.from_key_data(key_data), step)
        block = jax.random.categorical(jax.random.fold_in(key, 0), block_scores)
        token = jax.random.categorical(jax.random.fold_in(key, 1), blocks[block])
        return (block * width + token).astype(jnp.int32)

    return jax.vmap(draw)(keys, steps, blocks, jax.nn.logsumexp(blocks, -1))
