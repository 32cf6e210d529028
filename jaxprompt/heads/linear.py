"""A linear classifier on a pooled hidden state."""

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.layers.dropout import Dropout
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import ABSENT, Batch, Role

POOLERS = ("checkpoint", "trained", "cls", "mean")


def take(hidden, positions):
    """Picks hidden states at positions. [B, T, H], [B, M] -> [B, M, H]"""
    taken = jnp.take_along_axis(hidden, positions[..., None], axis=1)
    return constrain(taken, "act_batch", None, None)


def drop_absent(scores, counts):
    """Takes out the choices that an example does not have. [B, C], [B] or None -> [B, C]"""
    if counts is None:
        return scores
    return jnp.where(jnp.arange(scores.shape[1]) < counts[:, None], scores, ABSENT)


class Head(nn.Module):
    """Scores classes, or with one class the K choices of an example. [B*K, T, H] -> [B, C]

    The pooled vector is [CLS] through the checkpoint's own pooler, [CLS] through a trained dense
    layer with tanh, [CLS] itself, or the mean over real tokens. It is computed in float32.
    """

    classes: int
    pooler: str = "cls"
    dropout: float = 0.1

    @property
    def reads_all(self) -> bool:
        """Whether it reads every token, not `label_pos` alone."""
        return self.pooler == "mean"

    @nn.compact
    def __call__(self, hidden, batch: Batch, backbone, *, deterministic: bool):
        """Pools and scores."""
        tokens = batch.read
        if self.pooler == "mean":
            keep = (tokens.mask & (tokens.roles != Role.SOFT))[..., None]  # [B*K, T, 1]
            total = jnp.where(keep, hidden.astype(jnp.float32), 0.0).sum(1)
            pooled = total / jnp.maximum(keep.sum(1), 1)
        else:
            pooled = take(hidden, batch.label_pos[:, :1])[:, 0]  # [B*K, H]
            if self.pooler == "checkpoint":
                pooled = backbone.pool(pooled)
            pooled = pooled.astype(jnp.float32)
            if self.pooler == "trained":
                dense = nn.Dense(
                    pooled.shape[-1], kernel_init=nn.initializers.normal(0.02), name="pooler"
                )
                pooled = jnp.tanh(dense(pooled))
        pooled = Dropout(self.dropout)(pooled, deterministic=deterministic)
        init = nn.initializers.normal(0.02)
        scores = nn.Dense(self.classes, kernel_init=init, name="out")(pooled)  # [B*K, C]
        if self.classes == 1:  # an example with fewer choices has rows without a token
            scores = jnp.where(tokens.mask.any(-1, keepdims=True), scores, ABSENT)
        return drop_absent(scores.reshape(batch.labels.shape[0], -1), batch.counts)
