"""Masked language modelling (Devlin et al. 2019, section 3.1): masked tokens are predicted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxprompt.corpus.denoise.pack import Capacity
from jaxprompt.corpus.denoise.samples import Run, Sample, join_documents
from jaxprompt.corpus.denoise.vocabulary import plain_words, word_starts
from jaxprompt.data.text.specials import special_id
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.types import Role


def num_masked(candidates: int, rate: float) -> int:
    """Returns how many of the maskable tokens are masked: their share, rounded half to even.

    It is at least one, if there is any.
    """
    # As create_pretraining_data.py of BERT, but without the special tokens that it counts.
    return min(candidates, max(1, round(candidates * rate)))


@dataclass(frozen=True, eq=False)
class Denoiser:
    """Masks tokens of text, never special tokens, and predicts them.

    Of the chosen tokens, `masked` become the mask and `random` any word; the rest stay unchanged.
    """

    length: int
    mask_id: int
    cls_ids: tuple[int, ...]  # before the text
    sep_ids: tuple[int, ...]  # after each document
    word_ids: np.ndarray  # int32 [R], from which random words are sampled
    rate: float = 0.15
    masked: float = 0.8
    random: float = 0.1
    word_starts: np.ndarray | None = None  # bool [V], ids that begin a word: masks whole words
    unk_id: int = -1  # never chosen
    separate: bool = False

    end_ids: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        """Raises InputError if the rate or the length leaves nothing to predict."""
        if not self.rate:
            raise InputError("objective.rate=0 predicts no token; use e.g. 0.15, as BERT")
        num_special = len(self.cls_ids) + len(self.sep_ids)
        if self.length <= num_special:
            raise InputError(
                f"data.max_len={self.length} leaves no room besides {num_special} special tokens; "
                f"use {num_special + 1} or more"
            )

    @property
    def lengths(self) -> tuple[int]:
        """Width of the arrays."""
        return (self.length,)

    @property
    def max_targets(self) -> int:
        """Maximum number of tokens of a sample that are predicted."""
        # A sample of one document has the fewest special tokens.
        return num_masked(self.length - len(self.cls_ids) - len(self.sep_ids), self.rate)

    @property
    def capacity(self) -> Capacity:
        """The amount of text per sample."""
        num_cls, num_sep = len(self.cls_ids), len(self.sep_ids)
        # A [CLS] for each separate document, otherwise one for the sample.
        if self.separate:
            return Capacity(np.arange(self.length + 1)[None] + num_sep + num_cls, (self.length,))
        length = self.length - num_cls
        return Capacity(np.arange(length + 1)[None] + num_sep, (length,))

    def __call__(self, chunks: Sequence[np.ndarray], rng: np.random.RandomState) -> Sample:
        """Makes a sample from chunks of documents."""
        documents: list[list[Run]] = [
            [
                (self.cls_ids if self.separate or not i else (), Role.SPECIAL),
                (chunk, Role.TEXT),
                (self.sep_ids, Role.SPECIAL),
            ]
            for i, chunk in enumerate(chunks)
        ]
        text = join_documents(documents, self.separate)
        candidates = np.flatnonzero((text.roles == Role.TEXT) & (text.ids != self.unk_id))
        if self.word_starts is None:
            chosen = self._choose_tokens(candidates, rng)
        else:
            is_start = self.word_starts[text.ids[candidates]]
            chosen = self._choose_words(is_start, candidates, rng)
        targets = text.ids[chosen]  # a copy, as the index is an array
        # Both for every token, used or not, so that the fate of one does not affect the others.
        fate, word = rng.random_sample((2, len(chosen)))
        random_words = self.word_ids[(word * len(self.word_ids)).astype(np.intp)]
        inputs = np.where(fate < self.masked + self.random, random_words, targets)
        text.ids[chosen] = np.where(fate < self.masked, self.mask_id, inputs)
        return Sample(text, chosen.astype(np.int32), targets)

    def _choose_tokens(self, candidates: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        return np.sort(rng.permutation(candidates)[: num_masked(len(candidates), self.rate)])

    def _choose_words(
        self, is_start: np.ndarray, candidates: np.ndarray, rng: np.random.RandomState
    ) -> np.ndarray:
        """Chooses words until no further one fits the number of tokens to be predicted.

        `is_start` says which of the candidates can begin a word; it is modified.
        """
        # A document may be cut within a word. A slice, because there may be no candidates.
        is_start[:1] = True
        is_start[1:] |= candidates[1:] != candidates[:-1] + 1  # after a special token
        sizes = np.bincount(is_start.cumsum() - 1)
        remaining, is_chosen = num_masked(len(candidates), self.rate), np.zeros(len(sizes), bool)
        order = rng.permutation(len(sizes))
        for word, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
            # As in BERT's code: a word that is too long is skipped, and a shorter one may fit.
            if size <= remaining:
                is_chosen[word] = True
                remaining -= size
                if not remaining:
                    break
        return candidates[is_chosen.repeat(sizes)]


def make(
    tokenizer: Tokenizer,
    length: int,
    *,
    rate: float = 0.15,
    masked: float = 0.8,
    random: float = 0.1,
    whole_words: bool = False,
    separate: bool = False,
) -> Denoiser:
    """Builds the objective for a tokenizer. Raises InputError if it lacks a token."""
    mask, cls, sep = (special_id(tokenizer, name) for name in ("mask", "cls", "sep"))
    return Denoiser(
        length,
        mask,
        (cls,),
        (sep,),
        plain_words(tokenizer),
        rate,
        masked,
        random,
        word_starts=word_starts(tokenizer) if whole_words else None,
        unk_id=-1 if tokenizer.unk_token_id is None else tokenizer.unk_token_id,
        separate=separate,
    )
