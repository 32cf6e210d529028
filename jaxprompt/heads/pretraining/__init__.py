"""Heads of pre-training: predict masked tokens, and detect replaced tokens."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.layers.capping import logit_cap
from jaxprompt.layers.output import VocabScores, score_targets
from jaxprompt.layers.quantized import score_table
from jaxprompt.layers.reading import Scores, select_positions
from jaxprompt.types import ABSENT, Array, Batch


class TargetHead(Scores):
    """Scores `batch.targets` among the whole vocabulary. [B, T, H] -> Scored, arrays [B, M]

    With `draws` it also samples a token at each position, with the rng "draw".
    """

    block: int = 2048  # positions per device whose logits are in memory at once
    draws: bool = False

    @nn.compact
    def __call__(
        self, hidden, batch: Batch, injection, backbone, *, deterministic: bool
    ) -> VocabScores:
        """Scores the targets."""
        features = backbone.lm_features(select_positions(hidden, batch.label_pos))  # [B, M, X]
        table, bias = backbone.lm_table()
        targets = _targets(batch)
        chances = jax.random.uniform(self.make_rng("draw"), targets.shape) if self.draws else None
        return score_targets(
            features,
            table,
            bias,
            targets,
            block=self.block,
            uniforms=chances,
            cap=logit_cap(backbone),
        )


class LikeliestHead(Scores):
    """Returns the most likely token at each position that is read. [B, T, H] -> int32 [B, M]"""

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Scores one position at a time, since the logits of all would be large."""
        features = backbone.lm_features(select_positions(hidden, batch.label_pos))  # [B, M, X]
        table, bias = backbone.lm_table()

        def best_ids(features):  # [B, X]
            logits = score_table(features, table)
            # Not capped: a tanh keeps the order of the logits, and no capped model has a bias.
            return (logits if bias is None else logits + bias).argmax(-1)

        return jax.lax.map(best_ids, features.swapaxes(0, 1)).swapaxes(0, 1)


class Detected(NamedTuple):
    """The outputs of the replaced-token head for each token. Arrays are [B, T]."""

    logp: Array  # float32, log-probability of the right answer, ABSENT = ignored
    hit: Array  # bool, the prediction is right
    replaced: Array  # bool, the right answer


class ReplacedHead(Scores):
    """Detects replaced tokens with the checkpoint's head (Clark et al. 2020, section 2).

    [B, T, H], targets [B, T] of 1 = replaced, 0 = original, -1 = ignored -> Detected
    """

    reads_all: ClassVar[bool] = True

    @nn.compact
    def __call__(
        self, hidden, batch: Batch, injection, backbone, *, deterministic: bool
    ) -> Detected:
        """Scores the tokens."""
        logits = backbone.rtd(hidden).astype(jnp.float32)  # [B, T]
        targets = _targets(batch)
        replaced = targets == 1
        # log(1 - sigmoid(x)) is log sigmoid(-x), which does not round to log 0.
        logp = jax.nn.log_sigmoid(jnp.where(replaced, logits, -logits))
        hit = (logits > 0) == replaced
        return Detected(jnp.where(targets >= 0, logp, ABSENT), hit, replaced)


def _targets(batch: Batch) -> Array:
    if batch.targets is None:
        raise ValueError("the batch has no targets, which heads of pre-training need")
    return batch.targets
