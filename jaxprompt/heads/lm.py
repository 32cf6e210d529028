"""A verbalizer on the backbone's own masked-language-model head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.heads.linear import take
from jaxprompt.types import Batch


class Head(nn.Module):
    """Scores each class by its words at the mask positions. [B, T, H] -> [B, C]

    A word's score is the mean of its pieces' log-probabilities, piece j at mask j; a class's score
    is the mean over its words. "restricted" normalises over the verbalizer's pieces, whose rows of
    the output embedding alone are multiplied; "full" over the whole vocabulary, at the masks only,
    and returns [B, C + 1]: the last column is the best log-probability of any piece outside.
    """

    rows: Any  # int [R], the pieces' vocabulary ids
    where: Any  # int [C, W, M], rows of each word's pieces, -1 = none
    scores: str = "restricted"

    @nn.compact
    def __call__(self, hidden, batch: Batch, backbone, *, deterministic: bool):
        """Scores the classes."""
        rows, where = jnp.asarray(self.rows), jnp.asarray(self.where)
        features = backbone.lm_features(take(hidden, batch.label_pos))  # [B, M, X]
        table, bias = backbone.lm_table()
        if self.scores == "restricted":
            table, bias = table[rows], bias[rows]  # [R, X], [R]
        logits = jnp.einsum("bmx,rx->bmr", features, table.astype(features.dtype))
        logits = logits.astype(jnp.float32) + bias.astype(jnp.float32)
        logp = jax.nn.log_softmax(logits, axis=-1)  # [B, M, R or V]
        pieces = where if self.scores == "restricted" else jnp.where(where >= 0, rows[where], -1)
        mask_no = jnp.arange(where.shape[2])
        picked = logp[:, mask_no, jnp.maximum(pieces, 0)]  # [B, C, W, M]
        picked = jnp.where(pieces >= 0, picked, 0.0)
        count = (pieces >= 0).sum(-1)  # [C, W]
        words = picked.sum(-1) / jnp.maximum(count, 1)  # [B, C, W]
        classes = words.sum(-1) / jnp.maximum((count > 0).sum(-1), 1)  # [B, C]
        if self.scores == "restricted":
            return classes
        inside = jnp.zeros(table.shape[0], bool).at[rows].set(True)
        outside = jnp.where(inside, -jnp.inf, logp[:, 0]).max(-1)  # [B]
        return jnp.concatenate([classes, outside[:, None]], axis=-1)
