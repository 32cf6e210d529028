"""Shared parts of modules that score hidden states: heads, and the objectives of methods."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.layers.capping import logit_cap
from jaxprompt.layers.output import VocabScores, score_targets
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import ABSENT, Batch


class Scores(nn.Module):
    """The base of all head modules."""

    reads_all: ClassVar[bool] = False  # whether it reads every token, not only `label_pos`

    @nn.nowrap
    def state(self, hidden, batch: Batch):
        """Returns the hidden state that scores an example: the first requested one. -> [B*K, H]"""
        return select_positions(hidden, batch.label_pos[:, :1])[:, 0]

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays that may differ between runs of one program, {} if there are none."""
        return {}

    def with_arrays(self, arrays: Mapping[str, Any]) -> nn.Module:
        """Returns a copy with other arrays, which may be traced."""
        return self.clone(**arrays) if arrays else self


def separate_arrays(head: nn.Module) -> tuple[nn.Module, Any]:
    """Separates a head from its arrays, which are not hashable; returns their shape and bytes."""
    if not isinstance(head, Scores) or not (arrays := head.arrays()):
        return head, ()
    keys = [(x.shape, x.dtype.str, x.tobytes()) for x in map(np.asarray, jax.tree.leaves(arrays))]
    return head.with_arrays(jax.tree.map(lambda _: None, arrays)), tuple(keys)


def score_layer(width: int) -> nn.Dense:
    """Makes the linear layer "out" of a head, in its module. [..., H] -> [..., width]"""
    # BERT's initializer_range.
    return nn.Dense(width, kernel_init=nn.initializers.normal(0.02), name="out")


def select_positions(hidden, positions):
    """Selects hidden states at positions. [B, T, H], [B, M] -> [B, M, H]"""
    states = jnp.take_along_axis(hidden, positions[..., None], axis=1)
    return constrain(states, "act_batch", None, None)


def mask_absent(scores, counts, choice_of_score=None):
    """Masks the choices that an example does not have. [B, C], [B] or None -> [B, C]

    `choice_of_score` [C] is the choice that each score belongs to, if a choice has several.
    """
    if counts is None:
        return scores
    if choice_of_score is None:
        choice_of_score = jnp.arange(scores.shape[1])
    return jnp.where(choice_of_score < counts[:, None], scores, ABSENT)


class TargetScores(Scores):
    """Scores `batch.targets`, token by token. [B, T, H] -> float32 [B, M], ABSENT = no target"""

    block: int = 2048  # positions per device whose logits are in memory at a time

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Returns the log-probability of each target among the whole vocabulary."""
        return self.score(hidden, batch, backbone).logp

    @nn.nowrap
    def score(self, hidden, batch: Batch, backbone) -> VocabScores:
        """Scores each target among the whole vocabulary."""
        features = backbone.lm_features(select_positions(hidden, batch.label_pos))  # [B, M, X]
        table, bias = backbone.lm_table()
        return score_targets(
            features, table, bias, batch.targets, block=self.block, cap=logit_cap(backbone)
        )


class GreedyScores(TargetScores):
    """Scores targets, and tells whether no token is more likely. -> float32 [B, M, 2]"""

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Returns the log-probability of each target, and 1 where greedy search would write it."""
        scored = self.score(hidden, batch, backbone)
        return jnp.stack([scored.logp, scored.hit.astype(jnp.float32)], axis=-1)
