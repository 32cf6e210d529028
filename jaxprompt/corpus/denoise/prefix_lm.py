"""Prefix language modelling (Raffel et al. 2020, section 3.3.1): the rest of a text is predicted.

The objective of LM adaptation (Lester et al. 2021, section 3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from jaxprompt.corpus.denoise.pack import Capacity, seq2seq_capacity
from jaxprompt.corpus.denoise.samples import Run, Sample, join_documents, seq2seq_sample
from jaxprompt.data.text.specials import SENTINEL, sentinel_ids, special_id
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.types import Role


@dataclass(frozen=True, eq=False)
class Denoiser:
    """Feeds the beginning of a text to the encoder; the decoder generates the rest.

    The split point is uniformly random, or fixed by the `share` of the beginning. With a `mark`
    after the beginning and before the rest, the sample looks like T5's span corruption (as PPT
    adapts T5).
    """

    length: int
    start: int  # the first input of the decoder
    eos: int
    encoder_end: tuple[int, ...] = ()  # after the beginning
    share: float = 0.0  # of the beginning, 0 = a random split
    mark: tuple[int, ...] = ()
    separate: bool = False

    end_ids: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        """Raises InputError for a length without room for text."""
        min_length = 2 + max(self._encoder_extra, 1)
        if self.length < min_length:
            raise InputError(
                f"data.max_len={self.length} is too short to split; use {min_length} or more"
            )

    @property
    def _encoder_extra(self) -> int:
        """The number of encoder inputs after the beginning of the text."""
        return len(self.mark) + len(self.encoder_end)

    def _max_lengths(self, tokens: int) -> tuple[int, int]:
        """Returns the maximum lengths of a text's encoder and decoder inputs."""
        if self.share:
            prefix = self._prefix_length(tokens)
            return prefix + self._encoder_extra, len(self.mark) + tokens - prefix + 1
        # A random split may leave either side all tokens but one.
        return tokens - 1 + self._encoder_extra, len(self.mark) + tokens

    def _prefix_length(self, tokens: int) -> int:
        """Returns the length of the beginning at a fixed share; both sides have a token."""
        return min(max(round(tokens * self.share), 1), tokens - 1)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of a sample's text, if it is one text."""
        tokens = 2
        # With a fixed share the decoder's width follows from the split; otherwise it is `length`.
        while self._max_lengths(tokens + 1)[0] <= self.length and (
            self.share or self._max_lengths(tokens + 1)[1] <= self.length
        ):
            tokens += 1
        return tokens

    @property
    def lengths(self) -> tuple[int, int]:
        """Widths of the encoder's and the decoder's arrays."""
        return self.length, self._max_lengths(self.tokens)[1] if self.share else self.length

    @property
    def max_targets(self) -> int:
        """Maximum number of tokens of a sample that are predicted."""
        return self.lengths[1]

    @property
    def capacity(self) -> Capacity:
        """The amount of text per sample."""
        return seq2seq_capacity(self._max_lengths, self.tokens, self.lengths, self.separate)

    def __call__(self, chunks: Sequence[np.ndarray], rng: np.random.RandomState) -> Sample:
        """Makes a sample from chunks of documents."""
        texts = chunks if self.separate or len(chunks) == 1 else [np.concatenate(chunks)]
        # The upper bound of randint is exclusive, so that the rest has at least one token.
        splits = [
            self._prefix_length(len(text)) if self.share else rng.randint(1, len(text))
            for text in texts
        ]
        pairs = list(zip(texts, splits, strict=True))
        end = [(self.mark, Role.LABEL), (self.encoder_end, Role.SPECIAL)]
        prefixes: list[list[Run]] = [[(text[:split], Role.TEXT), *end] for text, split in pairs]
        encoder = join_documents(prefixes, self.separate)
        mark = np.array(self.mark, np.int32)
        targets = [np.concatenate([mark, text[split:]]) for text, split in pairs]
        return seq2seq_sample(encoder, targets, self.start, self.eos, self.separate)


def make(
    tokenizer: Tokenizer,
    length: int,
    *,
    start: int,
    eos: bool = True,
    share: float = 0.0,
    mark: bool = False,
    pattern: str = SENTINEL,
    separate: bool = False,
) -> Denoiser:
    """Builds the objective for a tokenizer; `start` is the first input of the model's decoder.

    `eos`: the encoder's input also ends with </s>. `mark`: the first sentinel separates the two.
    """
    eos_id = special_id(tokenizer, "eos")
    marks = sentinel_ids(tokenizer, int(mark), pattern)
    return Denoiser(length, start, eos_id, (eos_id,) if eos else (), share, marks, separate)
