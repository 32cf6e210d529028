"""Replaced-token detection (Clark et al. 2020, section 2).

A generator fills masks, and a discriminator predicts for each token whether it is the original.
Every chosen token becomes the mask, as in the paper; its published code leaves 15% of them
unchanged.
"""

from typing import NamedTuple

import numpy as np

from jaxprompt.corpus.denoise import mlm
from jaxprompt.data.text.tokenizer import Tokenizer


class ReplacedTokens(NamedTuple):
    """The discriminator's input and targets."""

    ids: np.ndarray  # int32 [..., T]
    labels: np.ndarray  # bool [..., T], True = replaced


def make(
    tokenizer: Tokenizer,
    length: int,
    *,
    rate: float = 0.15,
    whole_words: bool = False,
    separate: bool = False,
) -> mlm.Denoiser:
    """Builds the generator's objective. The paper's rate for large models is 0.25."""
    return mlm.make(
        tokenizer,
        length,
        rate=rate,
        masked=1.0,
        random=0.0,
        whole_words=whole_words,
        separate=separate,
    )


def replace_masks(
    ids: np.ndarray, label_pos: np.ndarray, targets: np.ndarray, sampled: np.ndarray
) -> ReplacedTokens:
    """Replaces the masks by the tokens that the generator sampled.

    A sampled token that equals the original counts as original. int [..., T], [..., M] x 3, targets
    -1 where nothing is predicted.
    """
    is_target = targets >= 0  # the others are padding
    leading = np.indices(targets.shape)[:-1]
    index = (*(axis[is_target] for axis in leading), label_pos[is_target])
    replaced, labels = ids.copy(), np.zeros(ids.shape, bool)
    replaced[index] = sampled[is_target]
    labels[index] = sampled[is_target] != targets[is_target]
    return ReplacedTokens(replaced, labels)
