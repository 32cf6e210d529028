"""All spans of a text that answer a question; each token is scored separately (DPT, section 3).

A token belongs to the answer if ELECTRA's replaced-token head considers it original; adjacent
tokens form a span. A text longer than the input is read in windows, each token in one of them.
"""

import dataclasses
import functools
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.data.text.windows import TextWindow
from jaxprompt.errors import InputError
from jaxprompt.heads import (
    BackboneInfo,
    HeadLayout,
    Labelled,
    TaskSetup,
    select_labelled,
    windows_by_text,
)
from jaxprompt.heads.discriminator import LOSSES, SCORES, check_discriminator
from jaxprompt.heads.spans import TextSpanHead, has_answers
from jaxprompt.layers.reading import Scores, score_layer, select_positions
from jaxprompt.scoring.answer_words import HAN
from jaxprompt.scoring.losses import binary_cross_entropy
from jaxprompt.scoring.metrics import SPAN_METRICS
from jaxprompt.scoring.span_sets import METRICS, score_span_sets
from jaxprompt.types import Batch, Objective

LAYERS = ("discriminator", "linear")
_JOINERS = "\u200c\u200d"
_TRIED = tuple(round(0.05 * step, 2) for step in range(1, 20))  # thresholds


class ScoredWords(NamedTuple):
    """The words of a text, and their scores."""

    text: str
    places: np.ndarray  # int32 [words, 2], characters
    scores: np.ndarray  # float64 [words], the maximum of s over its subwords


class AnswerSpan(NamedTuple):
    """A span of the answer."""

    text: str
    start: int  # its first character
    end: int  # after its last character
    score: float  # mean of s over its words


@dataclasses.dataclass(frozen=True)
class Head(TextSpanHead):
    """Scores every token of the text by whether it looks original after the question."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("prediction", "spans")
    READ_WITH: ClassVar[Mapping[str, str]] = {"single=False": "drop_substrings"}

    layer: str = kinds.option(
        "discriminator",
        "layer that scores tokens: the checkpoint's head, or a new linear layer",
        LAYERS,
    )
    score: str = kinds.option(
        "original",
        "score s of a token. original: 1 - sigmoid of the logit; replaced: sigmoid",
        SCORES,
    )
    loss: str = kinds.option("mean", "reduction over the tokens of a window: mean or sum", LOSSES)
    threshold: float = kinds.option(
        0.6, "a token belongs to the answer if 1 - s is below this (appendix A)", "in (0, 1)"
    )
    tune: bool = kinds.option(
        False, "the threshold is that of the best metric on dev; it is exported"
    )
    single: bool = kinds.option(
        False, "answers are alternatives of one span each (SQuAD), not one answer"
    )
    drop_substrings: bool = kinds.option(
        False, "an answer whose text is part of another's is left out"
    )
    no_answer: bool = kinds.option(
        False, "a question may have none; else the likeliest word is one at least"
    )
    stride: int = kinds.option(
        -1,
        "tokens by which windows of a long text overlap; -1 = 128; at most half a window",
        "at least -1",
    )

    def check_task(self, task: Task) -> None:
        """Raises InputError for another type of answer, or a metric that compares single spans."""
        super().check_task(task)
        if task.metric in SPAN_METRICS and task.metric not in METRICS:
            raise InputError(
                f"task.metric={task.metric} compares one span, but head.name={self.name} finds "
                f"several; use task.metric={' or '.join(METRICS)}, or head.name=spans"
            )

    def check_backbone(self, facts: BackboneInfo) -> None:
        """Raises InputError for a backbone that cannot score tokens."""
        super().check_backbone(facts)
        if self.layer == "discriminator":
            check_discriminator(self, facts, "head.layer=linear with another backbone")

    def lay_out(self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Reads every token of the text."""
        self.check_layout(setup)
        module = JudgedTokens(self.layer, self.score == "original")
        return HeadLayout(self, {"main": module}, self.specials(facts, setup, tokenizer))

    def answer_of(self, example: Example, places: np.ndarray) -> np.ndarray:
        """Marks the tokens of the answer. -> int32 [tokens], -1 = unknown"""
        labels = np.full(len(places), 0 if example.references else -1, np.int32)
        for start, end in example.spans[: 1 if self.single else None]:
            # Any overlap counts, since a subword may extend beyond an answer.
            labels[(places[:, 1] > start) & (places[:, 0] < end)] = 1
        return labels

    def read_window(
        self, window: TextWindow, at: int, cls_at: int, answer: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, slice]:
        """Selects the tokens that no other window reads, or else [CLS] without a label."""
        begin, end = window.read, window.end
        offset = at - window.first
        read = np.arange(offset + begin, offset + end, dtype=np.int32)
        # At least one position is read; the label -1 excludes it from the loss.
        read = read if len(read) else np.array([cls_at], np.int32)
        labels = np.full(len(read), -1, np.int32)
        labels[: end - begin] = answer[begin:end]
        return read, labels, slice(begin, end)

    def objectives(self, smoothing: float) -> list[Objective]:
        """Returns the binary cross entropy of the text's tokens."""
        loss = partial(binary_cross_entropy, smoothing=smoothing, is_mean=self.loss == "mean")
        return [Objective("main", loss)]

    def tell(self, task: Task, classes: int, splits: Mapping[str, Split]) -> list[str]:
        """Describes how many questions have several spans or none, and how many texts are split."""
        lines = []
        for name, split in splits.items():
            answers = [[text for text in texts if text] for texts in split.references]
            several, none = sum(len(x) > 1 for x in answers), sum(not x for x in answers)
            windows = np.bincount(split.parts.owner, minlength=split.size)
            lines.append(
                f"{name}: {several} of {split.size} questions with several answers, {none} "
                f"without, {int((windows > 1).sum())} texts are split into windows"
            )
        return lines

    # -- answers -----------------------------------------------------------------------------------

    def measure(self, metric: str, split: Split, outputs: Any, classes: int) -> dict[str, float]:
        """Compares the spans with the right ones; `tune` adds the best threshold."""
        words = list(_words_of(split, outputs))

        def measure_at(threshold: float) -> dict[str, float]:
            pred = [self._texts(one, threshold) for one in words]
            return self._compare(metric, split.references, pred)

        if not self.tune:
            return measure_at(self.threshold)
        scores = {at: measure_at(at) for at in _TRIED}
        # Of equally good thresholds the one nearest to the config's.
        best = max(scores, key=lambda at: (scores[at][metric], -abs(at - self.threshold)))
        return scores[best] | {"threshold": best}

    def labelled(self, split: Split, outputs: Any, classes: int) -> Labelled:
        """Returns the right and the predicted answers of the questions with known ones."""
        texts = (self._texts(words, self.threshold) for words in _words_of(split, outputs))
        return select_labelled(split.references, texts)

    def compare(self, metric: str, labelled: Labelled) -> dict[str, float]:
        """Compares the spans with the right ones."""
        if not has_answers(labelled):
            return {}
        return self._compare(metric, labelled.gold, labelled.pred)

    def answers(
        self, task: Task, examples: Sequence[Example], split: Split, outputs: Any, classes: int
    ) -> Iterator[dict[str, Any]]:
        """Yields the answers, and their positions in the text."""
        for words in _words_of(split, outputs):
            spans = self._spans(words, self.threshold)
            yield {"prediction": [x.text for x in spans], "spans": [x._asdict() for x in spans]}

    def _compare(
        self, metric: str, references: Sequence[Sequence[str]], pred: Sequence[Sequence[str]]
    ) -> dict[str, float]:
        gold = [[[text] for text in one] if self.single else [one] for one in references]
        return score_span_sets(metric, gold, pred)

    def _texts(self, words: ScoredWords, threshold: float) -> list[str]:
        return [span.text for span in self._spans(words, threshold)] or [""]

    def _spans(self, words: ScoredWords, threshold: float) -> list[AnswerSpan]:
        """Joins adjacent words above the threshold; of equal texts, only the first is kept.

        `drop_substrings` removes those for which `_is_substring` holds.
        """
        text, places, scores = words
        passes = scores > 1 - threshold
        if not self.no_answer and len(scores) and not passes.any():
            passes = np.arange(len(scores)) == scores.argmax()
        # Spans begin and end where `passes` changes.
        edges = np.flatnonzero(np.diff(passes.astype(int), prepend=0, append=0)).reshape(-1, 2)
        spans = []
        for first, last in edges:
            start, end = int(places[first, 0]), int(places[last - 1, 1])
            spans.append(AnswerSpan(text[start:end], start, end, float(scores[first:last].mean())))
        if self.single:
            return [max(spans, key=lambda span: span.score)] if spans else []
        distinct: dict[str, AnswerSpan] = {}
        for span in spans:
            distinct.setdefault(span.text.lower(), span)
        if self.drop_substrings:
            return [
                span
                for text, span in distinct.items()
                if not any(_is_substring(text, other) for other in distinct)
            ]
        return list(distinct.values())


def _is_substring(text: str, other: str) -> bool:
    """Returns whether a text is part of another one, as in DPT's released code.

    It counts if it is preceded by a space, is followed by a space, an s or an n, or is neither the
    beginning nor the end of the other text.
    """
    inside = text in other and not other.startswith(text) and not other.endswith(text)
    joined = f" {text}" in other or any(text + after in other for after in " sn")
    return text != other and (inside or joined)


def _words_of(split: Split, outputs: np.ndarray) -> Iterator[ScoredWords]:
    """Yields the words of each text. `outputs`: logits of s [windows, M]

    The score of a word is the maximum over its subwords, so spans consist of whole words. A Chinese
    character is a word; a combining mark belongs to the character before it.
    """
    pattern = _word_pattern()
    owner, offsets, texts = split.parts
    for text, windows in zip(texts, windows_by_text(owner, split.size), strict=True):
        places = np.array([m.span() for m in pattern.finditer(text)], np.int32).reshape(-1, 2)
        scores = np.zeros(len(places))
        for window in windows:
            characters = offsets[window]
            probs = np.exp(
                -np.logaddexp(0.0, -outputs[window, : len(characters)].astype(np.float64))
            )
            # A subword may span several words, e.g. Chinese characters or punctuation marks.
            first = np.searchsorted(places[:, 1], characters[:, 0], side="right")
            last = np.searchsorted(places[:, 0], characters[:, 1], side="left")
            for i, j, score in zip(first, last, probs, strict=True):
                scores[i:j] = np.maximum(scores[i:j], score)
        yield ScoredWords(text, places, scores)


@functools.cache
def _word_pattern() -> re.Pattern:
    characters = map(chr, range(sys.maxunicode + 1))
    marks = "".join(x for x in characters if unicodedata.category(x).startswith("M")) + _JOINERS
    return re.compile(rf"[{HAN}][{marks}]*|(?:[^\W{HAN}][{marks}]*)+|[^\w\s][{marks}]*")


class JudgedTokens(Scores):
    """Scores each token separately. [B, T, H] -> float32 [B, M], the logits of s

    s = 1 - sigmoid(z) with z from the replaced-token head, or from a new linear layer.
    """

    layer: str = "discriminator"
    original: bool = True

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Scores the tokens."""
        states = select_positions(hidden, batch.label_pos)  # [B, M, H]
        if self.layer == "discriminator":
            logits = backbone.rtd(states).astype(jnp.float32)
        else:
            logits = score_layer(1)(states.astype(jnp.float32))[..., 0]
        return -logits if self.original else logits
