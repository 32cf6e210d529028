"""Span corruption (Raffel et al. 2020, section 3.1.4, 3.3.4): dropped spans are predicted.

Spans of text and of noise alternate and begin with text. In the input the i-th noise span becomes
sentinel i; in the target the i-th span of text does. Hence a text that ends with noise, as all do
here, has no sentinel after the last span of its target; T5 was trained without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import numpy as np

from jaxprompt.corpus.denoise.pack import Capacity, seq2seq_capacity
from jaxprompt.corpus.denoise.samples import Sample, join_documents, seq2seq_sample
from jaxprompt.data.text.specials import SENTINEL, sentinel_ids, special_id
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.errors import InputError
from jaxprompt.types import Role


def noise_counts(tokens: int, density: float, span: float) -> tuple[int, int]:
    """Returns how many of 2 or more tokens are noise, and in how many spans."""
    # As T5's random_spans_noise_mask, but each noise span also has a token of text before it.
    noise = min(max(round(tokens * density), 1), tokens - 1)
    return noise, min(max(round(noise / span), 1), tokens - noise)


def corrupted_lengths(tokens: int, density: float, span: float) -> tuple[int, int]:
    """Returns the lengths of input and target, each with its sentinels and its end token."""
    noise, spans = noise_counts(tokens, density, span)
    return tokens - noise + spans + 1, noise + spans + 1


def tokens_for(length: int, density: float, span: float) -> int:
    """Returns the maximum number of tokens whose input is at most `length` long."""
    tokens = 2
    if corrupted_lengths(tokens, density, span)[0] > length:
        raise InputError(
            f"data.max_len={length} is too short for a token, a sentinel and an end token; use 3 "
            "or more"
        )
    # As T5's random_spans_helper: both counts are rounded, so there is no closed form.
    while corrupted_lengths(tokens + 1, density, span)[0] <= length:
        tokens += 1
    return tokens


def noise_mask(tokens: int, density: float, span: float, rng: np.random.RandomState) -> np.ndarray:
    """Samples which tokens are noise, uniformly over all ways to place the spans. bool [tokens]"""
    noise, spans = noise_counts(tokens, density, span)
    lengths = np.empty(2 * spans, np.int64)
    # Noise first, as in T5's code: the order of the random numbers matters.
    lengths[1::2] = _random_lengths(noise, spans, rng)
    lengths[::2] = _random_lengths(tokens - noise, spans, rng)
    return (np.arange(2 * spans) % 2 == 1).repeat(lengths)


def corrupt(ids: np.ndarray, noise: np.ndarray, marks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divides tokens into input and target, without end tokens; `marks` are the sentinels."""
    return _replace_spans(ids, noise, marks), _replace_spans(ids, ~noise, marks)


def _replace_spans(ids: np.ndarray, masked: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Replaces each masked span by the next sentinel."""
    first = masked.copy()
    # Only the first token of a span becomes a sentinel, the others are dropped.
    first[1:] &= ~masked[:-1]
    replaced = ids.copy()
    replaced[first] = marks[: np.count_nonzero(first)]
    return replaced[first | ~masked]


def _random_lengths(total: int, parts: int, rng: np.random.RandomState) -> np.ndarray:
    """Samples `parts` lengths of 1 or more that sum to `total`. int [parts]"""
    # Splits at `parts - 1` of the `total - 1` places between tokens: no part is empty, and all
    # divisions are equally likely, as in T5's _random_segmentation.
    ends = np.sort(rng.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate(([0], ends, [total])))


@dataclass(frozen=True, eq=False)
class Denoiser:
    """Drops spans of text and predicts them. The input of a full sample has exactly `length`."""

    length: int
    start: int  # the first input of the decoder
    eos: int
    marks: np.ndarray  # int32 [spans], the sentinels in order
    density: float = 0.15
    span: float = 3.0
    separate: bool = False

    end_ids: ClassVar[tuple[int, ...]] = ()

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of a sample's text, if it is one text."""
        return tokens_for(self.length, self.density, self.span)

    @property
    def lengths(self) -> tuple[int, int]:
        """Widths of the encoder's and the decoder's arrays."""
        # A full sample has the longest target.
        return self.length, corrupted_lengths(self.tokens, self.density, self.span)[1]

    @property
    def max_targets(self) -> int:
        """Maximum number of tokens of a sample that are predicted."""
        return self.lengths[1]

    @property
    def capacity(self) -> Capacity:
        """The amount of text per sample."""
        lengths_of = partial(corrupted_lengths, density=self.density, span=self.span)
        return seq2seq_capacity(lengths_of, self.tokens, self.lengths, self.separate)

    def __call__(self, chunks: Sequence[np.ndarray], rng: np.random.RandomState) -> Sample:
        """Makes a sample from chunks of documents."""
        texts = chunks if self.separate or len(chunks) == 1 else [np.concatenate(chunks)]
        pairs = [
            corrupt(text, noise_mask(len(text), self.density, self.span, rng), self.marks)
            for text in texts
        ]
        end = ((self.eos,), Role.SPECIAL)
        inputs, targets = zip(*pairs, strict=True)
        encoder = join_documents([[(ids, Role.TEXT), end] for ids in inputs], self.separate)
        return seq2seq_sample(encoder, targets, self.start, self.eos, self.separate)


def make(
    tokenizer: Tokenizer,
    length: int,
    *,
    start: int,
    density: float = 0.15,
    span: float = 3.0,
    pattern: str = SENTINEL,
    separate: bool = False,
) -> Denoiser:
    """Builds the objective for a tokenizer; `start` is the first input of the model's decoder.

    Raises InputError if the tokenizer has too few sentinels, or a value is out of range.
    """
    if not density:
        raise InputError("objective.rate=0 predicts no token; use e.g. 0.15, as T5")
    if not span >= 1:
        raise InputError(f"objective.span={span} must be at least 1; T5's is 3")
    eos = special_id(tokenizer, "eos")
    _, num_spans = noise_counts(tokens_for(length, density, span), density, span)
    marks = np.array(sentinel_ids(tokenizer, num_spans, pattern), np.int32)
    return Denoiser(length, start, eos, marks, density, span, separate)
