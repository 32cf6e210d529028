"""Causal language modelling (Radford et al. 2019): each token predicts the next."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxprompt.corpus.denoise.pack import Capacity
from jaxprompt.corpus.denoise.samples import Sample, join_documents
from jaxprompt.data.text.specials import special_id
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.types import Role


@dataclass(frozen=True, eq=False)
class Denoiser:
    """Predicts the next token of the same segment; `end_ids` end a document, not its chunks."""

    length: int
    end_ids: tuple[int, ...]
    separate: bool = False

    def __post_init__(self):
        """Checks values that come from a config."""
        if self.length < 2:
            raise InputError(f"data.max_len={self.length} leaves no next token; use 2 or more")

    @property
    def lengths(self) -> tuple[int]:
        """Width of the arrays."""
        return (self.length,)

    @property
    def max_targets(self) -> int:
        """Maximum number of tokens of a sample that are predicted."""
        # No token follows the last one of a sample.
        return self.length - 1

    @property
    def capacity(self) -> Capacity:
        """The amount of text per sample."""
        # A separate chunk of one token predicts nothing.
        return Capacity(
            np.arange(self.length + 1)[None], (self.length,), min_tokens=2 if self.separate else 1
        )

    def __call__(self, chunks: Sequence[np.ndarray], rng: np.random.RandomState) -> Sample:
        """Makes a sample from chunks of documents; nothing is random."""
        del rng
        text = join_documents([[(chunk, Role.TEXT)] for chunk in chunks], self.separate)
        # The next token must not be the first of a segment.
        label_pos = np.flatnonzero(text.positions[1:]).astype(np.int32)
        return Sample(text, label_pos, text.ids[label_pos + 1])


def make(tokenizer: Tokenizer, length: int, *, separate: bool = False) -> Denoiser:
    """Builds the objective for a tokenizer. Raises InputError if it has no end-of-text token."""
    return Denoiser(length, (special_id(tokenizer, "eos"),), separate)
