"""Masked language modelling (Devlin et al. 2019, section 3.1): masked tokens are predicted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxprompt.corpus.denoise.pack import Fit
from jaxprompt.corpus.denoise.rows import Run, Sample, join
from jaxprompt.corpus.denoise.vocabulary import need, plain_words, word_starts
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.types import Role


def predictions(candidates: int, rate: float) -> int:
    """Returns how many of the maskable tokens are masked: their share, rounded half to even.

    It is at least one, if there is any.
    """
    # As create_pretraining_data.py of BERT, which counts the specials among the tokens; here not.
    return min(candidates, max(1, round(candidates * rate)))


@dataclass(frozen=True, eq=False)
class Denoiser:
    """Masks tokens of text, never special tokens, and predicts them.

    Of the chosen tokens, `masked` become the mask and `random` any word; the rest stay unchanged.
    """

    length: int
    mask: int
    cls: tuple[int, ...]  # in front of the text
    end: tuple[int, ...]  # behind each document
    words: np.ndarray  # int32 [R], what a random word is drawn from
    rate: float = 0.15
    masked: float = 0.8
    random: float = 0.1
    starts: np.ndarray | None = None  # bool [V], ids that begin a word: words are hidden whole
    unknown: int = -1  # stands for text that the vocabulary lacks; never chosen
    apart: bool = False

    tail: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        """Checks values that come from a config."""
        if not 0 < self.rate < 1:
            raise InputError(
                f"objective.rate={self.rate} must be above 0 and below 1; BERT's is 0.15"
            )
        if min(self.masked, self.random) < 0 or self.masked + self.random > 1:
            raise InputError(
                f"shares masked={self.masked} and random={self.random} must be 0 or more, and at "
                "most 1 together; BERT's are 0.8 and 0.1"
            )
        around = len(self.cls) + len(self.end)
        if self.length <= around:
            raise InputError(
                f"data.max_len={self.length} leaves no room besides {around} special tokens; use "
                f"{around + 1} or more"
            )

    @property
    def lengths(self) -> tuple[int]:
        """Width of the arrays."""
        return (self.length,)

    @property
    def reads(self) -> int:
        """Maximum number of tokens of a row that are predicted."""
        # A row that holds one document has the fewest specials, and so the most to predict.
        return predictions(self.length - len(self.cls) - len(self.end), self.rate)

    @property
    def fit(self) -> Fit:
        """The amount of text per row."""
        front = len(self.cls)
        # Apart, each document has its own [CLS]; otherwise the row has one, taken off its room.
        around = len(self.end) + front * self.apart
        room = self.length - front * (not self.apart)
        return Fit(np.arange(room + 1)[None] + around, (room,))

    def __call__(self, pieces: Sequence[np.ndarray], rng: np.random.RandomState) -> Sample:
        """Makes a row from pieces of documents."""
        documents: list[list[Run]] = [
            [(self.cls if self.apart or not i else (), Role.SPECIAL), (piece, Role.TEXT),
             (self.end, Role.SPECIAL)]
            for i, piece in enumerate(pieces)
        ]  # fmt: skip
        text = join(documents, self.apart)
        at = np.flatnonzero((text.roles == Role.TEXT) & (text.ids != self.unknown))
        if self.starts is None:
            chosen = self._tokens(at, rng)
        else:
            chosen = self._words(self.starts[text.ids[at]], at, rng)
        # Indexing by an array copies: the originals outlive the writing below.
        targets = text.ids[chosen]
        # Both are drawn for every token, used or not: what becomes of one does not move the others.
        kind, word = rng.random_sample((2, len(chosen)))
        any_word = self.words[(word * len(self.words)).astype(np.intp)]
        shown = np.where(kind < self.masked + self.random, any_word, targets)
        text.ids[chosen] = np.where(kind < self.masked, self.mask, shown)
        return Sample(text, chosen.astype(np.int32), targets)

    def _tokens(self, at: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        return np.sort(rng.permutation(at)[: predictions(len(at), self.rate)])

    def _words(self, begins: np.ndarray, at: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        """Chooses words until no further one fits the number of tokens to be predicted.

        `begins` says which of the tokens `at` can begin a word, and is written to.
        """
        # A document may be cut inside a word; the slice also serves a row without candidates.
        begins[:1] = True
        begins[1:] |= at[1:] != at[:-1] + 1  # behind a special
        sizes = np.bincount(begins.cumsum() - 1)
        left, taken = predictions(len(at), self.rate), np.zeros(len(sizes), bool)
        order = rng.permutation(len(sizes))
        for word, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
            # As in BERT's code: a word that is too long is skipped, and a shorter one may fit.
            if size <= left:
                taken[word] = True
                left -= size
                if not left:
                    break
        return at[taken.repeat(sizes)]


def make(
    tokenizer: Tokenizer,
    length: int,
    *,
    rate: float = 0.15,
    masked: float = 0.8,
    random: float = 0.1,
    whole_words: bool = False,
    apart: bool = False,
) -> Denoiser:
    """Builds the objective for a tokenizer. Raises InputError if it lacks a token."""
    mask, cls, sep = (need(tokenizer, name, "masking") for name in ("mask", "cls", "sep"))
    return Denoiser(
        length,
        mask,
        (cls,),
        (sep,),
        plain_words(tokenizer),
        rate,
        masked,
        random,
        starts=word_starts(tokenizer) if whole_words else None,
        unknown=-1 if tokenizer.unk_token_id is None else tokenizer.unk_token_id,
        apart=apart,
    )
