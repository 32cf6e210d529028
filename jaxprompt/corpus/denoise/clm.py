"""Causal language modelling (Radford et al. 2019): each token predicts the next."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxprompt.corpus.denoise.pack import Fit
from jaxprompt.corpus.denoise.rows import Sample, join
from jaxprompt.corpus.denoise.vocabulary import need
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.types import Role


@dataclass(frozen=True, eq=False)
class Denoiser:
    """Predicts the next token of the same segment; `tail` ends a document, not a piece of it."""

    length: int
    tail: tuple[int, ...]
    apart: bool = False

    def __post_init__(self):
        """Checks values that come from a config."""
        if self.length < 2:
            raise InputError(f"data.max_len={self.length} leaves no next token; use 2 or more")

    @property
    def lengths(self) -> tuple[int]:
        """Width of the arrays."""
        return (self.length,)

    @property
    def reads(self) -> int:
        """Maximum number of tokens of a row that are predicted."""
        # The last token of a row has nothing behind it to predict.
        return self.length - 1

    @property
    def fit(self) -> Fit:
        """The amount of text per row."""
        # Apart from others, a piece of one token predicts nothing.
        return Fit(np.arange(self.length + 1)[None], (self.length,), least=2 if self.apart else 1)

    def __call__(self, pieces: Sequence[np.ndarray], rng: np.random.RandomState) -> Sample:
        """Makes a row from pieces of documents; nothing is random."""
        del rng
        text = join([[(piece, Role.TEXT)] for piece in pieces], self.apart)
        at = np.flatnonzero(text.positions[1:])  # what follows is no first token of a segment
        return Sample(text, at.astype(np.int32), text.ids[at + 1])


def make(tokenizer: Tokenizer, length: int, *, apart: bool = False) -> Denoiser:
    """Builds the objective for a tokenizer. Raises InputError if it has no end-of-text token."""
    return Denoiser(length, (need(tokenizer, "eos", "causal language modelling"),), apart)
