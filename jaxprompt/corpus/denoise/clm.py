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
    """Asks for the next token of the same segment; `tail` ends a document, not a piece of it."""

    length: int
    tail: tuple[int, ...]
    apart: bool = False

    def __post_init__(self):
        """Checks what a config may get wrong."""
        if self.length < 2:
            raise InputError(
                f"data.max_len={self.length} holds no next token; raise it to 2 or more"
            )

    @property
    def lengths(self) -> tuple[int]:
        """Width of the arrays."""
        return (self.length,)

    @property
    def reads(self) -> int:
        """Most tokens of a row that are predicted."""
        # The last token of a row has nothing behind it to predict.
        return self.length - 1

    @property
    def fit(self) -> Fit:
        """How much text a row takes."""
        # Apart from others, a piece of one token predicts nothing.
        return Fit(np.arange(self.length + 1)[None], (self.length,), least=2 if self.apart else 1)

    def __call__(self, pieces: Sequence[np.ndarray], rng: np.random.RandomState) -> Sample:
        """Makes a row of pieces of documents. Nothing is drawn."""
        del rng
        text = join([[(piece, Role.TEXT)] for piece in pieces], self.apart)
        at = np.flatnonzero(text.positions[1:])  # what follows is no first token of a segment
        return Sample(text, at.astype(np.int32), text.ids[at + 1])


def make(tokenizer: Tokenizer, length: int, *, apart: bool = False) -> Denoiser:
    """Builds the objective for a tokenizer. Raises InputError where it has no end of text."""
    return Denoiser(length, (need(tokenizer, "eos", "causal language modelling"),), apart)
