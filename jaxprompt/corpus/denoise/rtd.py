"""Replaced-token detection (Clark et al. 2020, section 2).

A generator fills masks, and a discriminator predicts for each token whether it is the original.
Every chosen token becomes the mask, as in the paper; its published code leaves 15% of them
unchanged.
"""

from typing import NamedTuple

import numpy as np

from jaxprompt.corpus.denoise import mlm
from jaxprompt.data.text.tokenizer import Tokenizer


class Replaced(NamedTuple):
    """The discriminator's input and targets."""

    ids: np.ndarray  # int32 [..., T]
    labels: np.ndarray  # bool [..., T], True = replaced


def make(
    tokenizer: Tokenizer,
    length: int,
    *,
    rate: float = 0.15,
    whole_words: bool = False,
    apart: bool = False,
) -> mlm.Denoiser:
    """Builds the generator's objective. The paper's rate for large models is 0.25."""
    return mlm.make(
        tokenizer, length, rate=rate, masked=1.0, random=0.0, whole_words=whole_words, apart=apart
    )


def replace(
    ids: np.ndarray, label_pos: np.ndarray, targets: np.ndarray, drawn: np.ndarray
) -> Replaced:
    """Replaces the masks by the tokens that the generator sampled.

    A sampled token that equals the original counts as original. int [..., T], [..., M] x 3, targets
    -1 where nothing is predicted.
    """
    # Rows predict different numbers of tokens; the rest of each is padding.
    there = targets >= 0
    rows = np.indices(targets.shape)[:-1]
    at = (*(axis[there] for axis in rows), label_pos[there])
    shown, labels = ids.copy(), np.zeros(ids.shape, bool)
    shown[at] = drawn[there]
    labels[at] = drawn[there] != targets[there]
    return Replaced(shown, labels)
