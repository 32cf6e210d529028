"""Prefix language modelling (Raffel et al. 2020, section 3.3.1): the rest of a text is predicted.

The objective of LM adaptation (Lester et al. 2021, section 3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from jaxprompt.corpus.denoise.pack import Fit
from jaxprompt.corpus.denoise.rows import Sample, join, write
from jaxprompt.corpus.denoise.vocabulary import need, sentinels
from jaxprompt.data.text.specials import SENTINEL
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.types import Role


@dataclass(frozen=True, eq=False)
class Denoiser:
    """Feeds the beginning of a text to the encoder; the decoder generates the rest.

    The split point is uniformly random, or fixed by the `share` of the beginning. With a `mark`
    after the beginning and before the rest, the row looks like T5's span corruption (as PPT adapts
    T5).
    """

    length: int
    start: int  # what the decoder is fed first
    eos: int
    end: tuple[int, ...] = ()  # behind the front
    share: float = 0.0  # of the text in front, 0 = anywhere
    mark: tuple[int, ...] = ()
    apart: bool = False

    tail: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        """Checks values that come from a config."""
        if not 0 <= self.share < 1:
            raise InputError(
                f"objective.share={self.share}, the share of the text for the encoder, must be "
                "above 0 and below 1, or 0 for a random split"
            )
        least = 2 + max(self._behind, 1)
        if self.length < least:
            raise InputError(
                f"data.max_len={self.length} is too short to split; use {least} or more"
            )

    @property
    def _behind(self) -> int:
        return len(self.mark) + len(self.end)

    def _sizes(self, tokens: int) -> tuple[int, int]:
        """Places that a text may take in the encoder and in the decoder."""
        if self.share:
            front = self._front(tokens)
            return front + self._behind, len(self.mark) + tokens - front + 1
        # A split that is drawn may leave either side all tokens but one.
        return tokens - 1 + self._behind, len(self.mark) + tokens

    def _front(self, tokens: int) -> int:
        # Each side keeps a token: an encoder cannot read nothing, nor a decoder be asked for it.
        return min(max(round(tokens * self.share), 1), tokens - 1)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of a row's text, if it is one text."""
        tokens = 2
        # With a fixed share the decoder's width follows from the split; otherwise it is `length`.
        while self._sizes(tokens + 1)[0] <= self.length and (
            self.share or self._sizes(tokens + 1)[1] <= self.length
        ):
            tokens += 1
        return tokens

    @property
    def lengths(self) -> tuple[int, int]:
        """Widths of the encoder's and the decoder's arrays."""
        return self.length, self._sizes(self.tokens)[1] if self.share else self.length

    @property
    def reads(self) -> int:
        """Maximum number of tokens of a row that are predicted."""
        return self.lengths[1]

    @property
    def fit(self) -> Fit:
        """The amount of text per row."""
        if not self.apart:
            return Fit(np.arange(self.tokens + 1)[None], (self.tokens,), least=2)
        # A piece has 2 tokens or more; the entries below keep the costs from falling.
        sizes = [self._sizes(max(n, 2)) for n in range(self.tokens + 1)]
        return Fit(np.array(sizes).T, self.lengths, least=2)

    def __call__(self, pieces: Sequence[np.ndarray], rng: np.random.RandomState) -> Sample:
        """Makes a row from pieces of documents."""
        texts = pieces if self.apart or len(pieces) == 1 else [np.concatenate(pieces)]
        # randint leaves its upper bound out, so that the rest has a token at least.
        fronts = [
            self._front(len(text)) if self.share else rng.randint(1, len(text)) for text in texts
        ]
        marks = [(self.mark, Role.LABEL), (self.end, Role.SPECIAL)]
        pairs = list(zip(texts, fronts, strict=True))
        encoder = join([[(text[:at], Role.TEXT), *marks] for text, at in pairs], self.apart)
        mark = np.array(self.mark, np.int32)
        rests = [np.concatenate([mark, text[at:]]) for text, at in pairs]
        return write(encoder, rests, self.start, self.eos, self.apart)


def make(
    tokenizer: Tokenizer,
    length: int,
    *,
    start: int,
    eos: bool = True,
    share: float = 0.0,
    mark: bool = False,
    pattern: str = SENTINEL,
    apart: bool = False,
) -> Denoiser:
    """Builds the objective for a tokenizer; `start` is the first input of the model's decoder.

    `eos`: the encoder's input also ends with </s>. `mark`: the first sentinel separates the two.
    """
    last = need(tokenizer, "eos", "prefix language modelling")
    marks = tuple(sentinels(tokenizer, 1, pattern).tolist()) if mark else ()
    return Denoiser(length, start, last, (last,) if eos else (), share, marks, apart)
