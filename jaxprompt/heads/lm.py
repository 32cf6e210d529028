"""Heads on the backbone's own language-model head: label words, and free text."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.heads.linear import drop_absent, take
from jaxprompt.layers.output import score_targets
from jaxprompt.layers.product import einsum
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import ABSENT, Batch


def log_probabilities(backbone, hidden, rows=None):
    """Scores vocabulary rows, or all of them. [B, M, H] -> float32 [B, M, R or V]

    Normalised over the rows scored, whose part of the output table alone is multiplied; a row of
    -1 is none.
    """
    features = constrain(backbone.lm_features(hidden), "act_batch", None, None)  # [B, M, X]
    table, bias = backbone.lm_table()
    if rows is not None:
        table, bias = table[rows], None if bias is None else bias[rows]
    logits = einsum("bmx,rx->bmr", features, table.astype(features.dtype), jnp.float32)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    if rows is not None:
        logits = jnp.where(rows >= 0, logits, ABSENT)
    logits = constrain(logits, "act_batch", None, "act_vocab" if rows is None else None)
    return jax.nn.log_softmax(logits, axis=-1)


class Head(nn.Module):
    """Scores each class by its words. [B, T, H] -> [B, C]

    A word's score is the mean, or the sum, of its pieces' log-probabilities, each read where the
    model predicts it; a class's score is the mean over its words. "restricted" normalises over the
    verbalizer's pieces, and a choice that an example lacks is ABSENT; "full" over the whole
    vocabulary, at the read positions only, and returns [B, C + 1]: the last column is the best
    log-probability of any piece outside, where the first piece is read. A class without words is
    ABSENT.
    """

    rows: Any  # int [R], the pieces' vocabulary ids, -1 = none
    where: Any  # int [C, W, J], rows of each word's pieces, -1 = none
    at: Any  # int [C, W, J], which of the M read positions predicts each piece
    scores: str = "restricted"
    pieces: str = "mean"
    reads_all: ClassVar[bool] = False

    @nn.compact
    def __call__(self, hidden, batch: Batch, backbone, *, deterministic: bool):
        """Scores the classes."""
        rows, where, at = (jnp.asarray(x) for x in (self.rows, self.where, self.at))
        restricted = self.scores == "restricted"
        read = take(hidden, batch.label_pos)  # [B, M, H]
        logp = log_probabilities(backbone, read, rows if restricted else None)
        columns = where if restricted else rows[where]
        picked = logp[:, jnp.maximum(at, 0), jnp.maximum(columns, 0)]  # [B, C, W, J]
        picked = jnp.where(where >= 0, picked, 0.0)
        count = (where >= 0).sum(-1)  # [C, W]
        words = picked.sum(-1)  # [B, C, W]
        if self.pieces == "mean":
            words = words / jnp.maximum(count, 1)
        some = (count > 0).sum(-1)  # [C]
        classes = jnp.where(some > 0, words.sum(-1) / jnp.maximum(some, 1), ABSENT)  # [B, C]
        if restricted:
            return drop_absent(classes, batch.counts)
        inside = jnp.zeros(logp.shape[2], bool)
        inside = inside.at[jnp.where(rows >= 0, rows, logp.shape[2])].set(True, mode="drop")
        outside = jnp.where(inside, -jnp.inf, logp[:, at[0, 0, 0]]).max(-1)  # [B]
        return jnp.concatenate([classes, outside[:, None]], axis=-1)


class TextHead(nn.Module):
    """Scores a free text, token by token. [B, T, H] -> float32 [B, M], ABSENT = no token there"""

    block: int = 2048  # positions of a device whose logits are held at a time
    reads_all: ClassVar[bool] = False

    @nn.compact
    def __call__(self, hidden, batch: Batch, backbone, *, deterministic: bool):
        """Gives the log-probability of each token of the target."""
        features = backbone.lm_features(take(hidden, batch.label_pos))  # [B, M, X]
        scored = score_targets(features, *backbone.lm_table(), batch.targets, block=self.block)
        return scored.logp
