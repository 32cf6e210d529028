"""The span of a text that answers a question (Liu et al. 2022, "P-Tuning v2", section 3.2).

Start and end are scored at every token of the text, and no answer at [CLS] (Devlin et al. 2019,
section 4.3). A text longer than the input is read in windows, and the best span of all is the
answer.
"""

import dataclasses
import functools
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.template import Template
from jaxprompt.data.text.tokenizer import Tokenizer, encode_with_offsets
from jaxprompt.data.text.windows import TextWindow
from jaxprompt.errors import InputError
from jaxprompt.heads import (
    BackboneInfo,
    HeadLayout,
    Labelled,
    TaskSetup,
    WindowHead,
    label_table,
    select_labelled,
    windows_by_text,
)
from jaxprompt.layers.reading import Scores, score_layer, select_positions
from jaxprompt.scoring import metrics
from jaxprompt.scoring.losses import END, START, span_loss
from jaxprompt.types import ABSENT, Batch, Objective


class TextWindows(NamedTuple):
    """How texts were cut into windows."""

    owner: np.ndarray  # int32 [windows], index of its example
    offsets: list[np.ndarray]  # int32 [tokens, 2] of each window: characters of its tokens
    texts: list[str]  # of each example


class SpanAnswer(NamedTuple):
    """The answer to a question."""

    text: str  # "" = no answer
    start: int  # its first character, -1 = no answer
    end: int  # after its last character
    score: float  # its probability among the candidates
    span: str  # the best span, which is the answer unless there is none
    margin: float  # score of no answer minus that of this span


class TextSpanHead(WindowHead):
    """The base of heads whose answer is in the last field of a task."""

    OF: ClassVar[str] = "spans"
    DEFAULT_STRIDE: ClassVar[int] = 128
    tune: bool
    threshold: float

    def check_template(self, template: Template) -> None:
        """Raises InputError if the last field of the template, the text, is in it twice."""
        fields = [part for part in template.parts if part.kind == "field"]
        last = fields[-1]
        if sum(part.text == last.text for part in fields) > 1 or last.modifiers:
            raise InputError(
                f"template {template.source!r} must contain {{{last.text}}}, the text with the "
                "answer, once and without modifiers"
            )

    def check_layout(self, setup: TaskSetup) -> None:
        """Raises InputError if the last field of the template is not that of the task."""
        if setup.template.fields[-1] != setup.task.fields[-1]:
            raise InputError(
                f"template {setup.template.source!r} must end with {{{setup.task.fields[-1]}}}, "
                "the last of task.fields: the text with the answer"
            )

    def longest_example(self, task: Task, text: str, max_target: int) -> Example:
        """Returns a text of maximum length, after a question of one word."""
        fields = dict.fromkeys(task.fields, "a") | {task.fields[-1]: text}
        return Example(fields, references=("a",), spans=((0, 1),))

    def encode(
        self,
        encoder: ExampleEncoder,
        task: Task,
        examples: Sequence[Example],
        *,
        classes: int,
        targets: bool,
    ) -> Split:
        """Encodes questions, each with its text in as many windows as needed."""
        field = task.fields[-1]
        rows, labels, owner, offsets = [], [], [], []
        gaps = list(encoder.gaps(examples, field))
        texts = encode_with_offsets(encoder.tokenizer, [gap.field.text for gap in gaps])
        for number, (example, gap) in enumerate(zip(examples, gaps, strict=True)):
            ids, places = texts[gap.field.text]
            # A space that the template puts before the text replaces the text's own white space.
            places = places + (len(example.fields[field]) - len(gap.field.text))
            answer = self.answer_of(example, places)
            # Windows may begin or end within a word.
            for window in self.cut_windows([1] * len(ids), gap.room):
                row, at = encoder.fill_gap(gap, ids[window.first : window.last])
                read, window_labels, inside = self.read_window(window, at, encoder.cls_at, answer)
                rows.append([row._replace(label_pos=read, num_choices=len(read))])
                labels.append(window_labels)
                owner.append(number)
                offsets.append(places[inside])
        counts = np.array([row[0].num_choices for row in rows], np.int32)
        parts = TextWindows(np.array(owner, np.int32), offsets, [e.fields[field] for e in examples])
        references = [e.references for e in examples]
        return Split(rows, label_table(labels, counts.max()), counts, references, parts)

    def fitted(self, dev: Mapping[str, float]) -> "TextSpanHead":
        """Returns a copy with the threshold that was best on dev."""
        if not self.tune or "threshold" not in dev:
            return self
        fields: dict[str, Any] = {"tune": False, "threshold": dev["threshold"]}
        return dataclasses.replace(self, **fields)

    def answer_of(self, example: Example, places: np.ndarray) -> Any:
        """Returns the tokens of the answer; `places` int32 [tokens, 2] are their characters."""
        raise TypeError(f"{type(self).__module__} must define answer_of")

    def read_window(
        self, window: TextWindow, at: int, cls_at: int, right: Any
    ) -> tuple[np.ndarray, np.ndarray, slice]:
        """Returns what is read of a window whose text begins at position `at`.

        `right` is the result of `answer_of`. Returns positions int32 [M], labels int32 [M], and the
        slice of the text's tokens that they belong to, after [CLS] if that is read too.
        """
        raise TypeError(f"{type(self).__module__} must define read_window")


def has_answers(labelled: Labelled) -> bool:
    """Returns whether any question has an answer.

    Then an empty text means no answer; otherwise all answers are unknown.
    """
    return any(map(any, labelled.gold))


@dataclasses.dataclass(frozen=True)
class Head(TextSpanHead):
    """A linear layer that scores every token as start and as end."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("prediction", "score", "start", "end")
    READ_WITH: ClassVar[Mapping[str, str]] = {"no_answer": "threshold"}

    stride: int = kinds.option(
        -1,
        "tokens by which windows of a long text overlap; -1 = 128; at most half a window",
        "at least -1",
    )
    max_answer: int = kinds.option(30, "tokens of an answer", "at least 1")
    n_best: int = kinds.option(
        20, "number of best starts, and of best ends, that are combined per window", "at least 1"
    )
    no_answer: bool = kinds.option(
        False, "questions may have no answer (SQuAD 2.0); False = always predict the best span"
    )
    threshold: float = kinds.option(
        0.0, "no_answer: by how much its score must be over that of the best span"
    )
    tune: bool = kinds.option(
        False, "no_answer: the threshold is that of the best metric on dev; it is exported"
    )

    def check(self) -> None:
        """Raises InputError for fields that contradict each other."""
        if self.tune and not self.no_answer:
            raise InputError(
                "head.tune=True selects the threshold of no answer; set head.no_answer=True, or "
                "leave head.tune out"
            )

    def lay_out(self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Reads [CLS] and every token of the text."""
        self.check_layout(setup)
        specials = self.specials(facts, setup, tokenizer)
        return HeadLayout(self, {"main": SpanScores()}, specials)

    def answer_of(self, example: Example, places: np.ndarray) -> tuple[int, int] | None:
        """Returns the first and the last token, (-1, -1) = no answer; None if it is unknown."""
        if not example.references:
            return None
        return (example.spans and _tokens_of(places, example.spans[0])) or (-1, -1)

    def read_window(
        self, window: TextWindow, at: int, cls_at: int, answer: tuple[int, int] | None
    ) -> tuple[np.ndarray, np.ndarray, slice]:
        """Reads [CLS], the label if the answer is elsewhere, and every token."""
        first, last = window.first, window.last
        read = np.array([cls_at, *range(at, at + last - first)], np.int32)
        labels = np.full(len(read), -1 if answer is None else 0, np.int32)
        if answer is not None:
            inside = first <= answer[0] and answer[1] < last
            # [CLS] is read first; it is the label if this window cuts the answer.
            start, end = (1 + x - first for x in answer) if inside else (0, 0)
            labels[start] |= START
            labels[end] |= END
        return read, labels, slice(first, last)

    def objectives(self, smoothing: float) -> list[Objective]:
        """Returns the mean of the cross entropies of start and end."""
        return [Objective("main", functools.partial(span_loss, smoothing=smoothing))]

    def tell(self, task: Task, classes: int, splits: Mapping[str, Split]) -> list[str]:
        """Describes how many questions have no answer, and how many texts are split."""
        lines = []
        for name, split in splits.items():
            none = sum(not any(texts) for texts in split.references)
            windows = np.bincount(split.parts.owner, minlength=split.size)
            lines.append(
                f"{name}: {none} of {split.size} questions without an answer, "
                f"{int((windows > 1).sum())} texts are split into windows"
            )
            long, cut = self._out_of_reach(split)
            if long or cut:
                lines.append(
                    f"{name}: of {split.size} questions, {long} have an answer longer than "
                    f"head.max_answer={self.max_answer} tokens and {cut} have an answer that no "
                    "window contains completely; these answers cannot be predicted: raise "
                    "head.max_answer, head.stride or data.max_len"
                )
        return lines

    def _out_of_reach(self, split: Split) -> tuple[int, int]:
        """Counts answers that are longer than max_answer, and those that every window cuts.

        Of several answers, only the first is a training target, and counts here.
        """
        lengths = np.zeros(split.size, int)  # 0 = no window contains it
        rows, starts = np.nonzero((split.labels > 0) & (split.labels & START > 0))
        ends = np.nonzero((split.labels > 0) & (split.labels & END > 0))[1]
        not_cls = starts > 0  # an answer at [CLS] is in another window
        lengths[split.parts.owner[rows[not_cls]]] = (ends - starts + 1)[not_cls]
        answerable = np.array([any(texts) for texts in split.references])
        return int((lengths > self.max_answer).sum()), int((answerable & (lengths == 0)).sum())

    def measure(self, metric: str, split: Split, outputs: Any, classes: int) -> dict[str, float]:
        """Compares answers with all right ones; `tune` adds the best threshold."""
        answers = list(self._answers(split, outputs))
        if not self.tune:
            texts = [answer.text for answer in answers]
            return metrics.score_spans(metric, split.references, texts)
        threshold = _best_threshold(metric, split.references, answers)
        texts = ["" if answer.margin > threshold else answer.span for answer in answers]
        return metrics.score_spans(metric, split.references, texts) | {"threshold": threshold}

    def labelled(self, split: Split, outputs: Any, classes: int) -> Labelled:
        """Returns the right and the predicted answers of the questions with known ones."""
        texts = (answer.text for answer in self._answers(split, outputs))
        return select_labelled(split.references, texts)

    def compare(self, metric: str, labelled: Labelled) -> dict[str, float]:
        """Compares answers with all right ones."""
        if not has_answers(labelled):
            return {}
        return metrics.score_spans(metric, labelled.gold, labelled.pred)

    def answers(
        self, task: Task, examples: Sequence[Example], split: Split, outputs: Any, classes: int
    ) -> Iterator[dict[str, Any]]:
        """Yields the answers, with their characters in the text."""
        for answer in self._answers(split, outputs):
            yield {
                "prediction": answer.text,
                "score": answer.score,
                "start": answer.start,
                "end": answer.end,
            }

    def _answers(self, split: Split, outputs: np.ndarray) -> Iterator[SpanAnswer]:
        """Yields the answer of each example; `outputs` is [windows, M, 2]."""
        owner, offsets, texts = split.parts
        for text, windows in zip(texts, windows_by_text(owner, split.size), strict=True):
            window_scores, spans, null = [], [], np.inf
            for window in windows:
                start, end = outputs[window, : split.counts[window]].T  # [M]
                # The window that is most likely to contain an answer decides, as in BERT's script
                # for SQuAD 2.0.
                null = min(null, start[0] + end[0])
                # [CLS] comes first and is no part of a span.
                pair_scores, pairs = _best_spans(start[1:], end[1:], self.n_best, self.max_answer)
                window_scores.append(pair_scores)
                spans.append(offsets[window][pairs])  # [spans, 2, 2]
            scores, places = np.concatenate(window_scores), np.concatenate(spans)
            has_words = _holds_words(text, places)
            scores, places = _each_once(scores[has_words], places[has_words])
            if not len(scores):
                yield SpanAnswer("", -1, -1, 1.0, "", np.inf)
                continue
            best = int(scores.argmax())
            best_score = scores[best]
            # The maximum is subtracted because exponentials would overflow.
            top = float(max(best_score, null) if self.no_answer else best_score)
            total = np.exp(scores - top).sum() + (np.exp(null - top) if self.no_answer else 0.0)
            first, last = _trim(text, int(places[best, 0, 0]), int(places[best, 1, 1]))
            span, margin = text[first:last], float(null - best_score)
            if self.no_answer and margin > self.threshold:
                yield SpanAnswer("", -1, -1, float(np.exp(null - top) / total), span, margin)
                continue
            score = float(np.exp(best_score - top) / total)
            yield SpanAnswer(span, first, last, score, span, margin)


def _best_threshold(
    metric: str, references: Sequence[Sequence[str]], answers: Sequence[SpanAnswer]
) -> float:
    """Finds the threshold of no answer with the best metric, of equal ones that nearest to 0.

    It is midway between the margins of two questions, or beyond all margins.
    """

    def score(references: Sequence[str], text: str) -> float:
        return metrics.score_spans(metric, [references], [text])[metric]

    pairs = list(zip(references, answers, strict=True))
    # The metric is a mean over questions, so the gains of questions add up.
    gains = np.array([score(right, answer.span) - score(right, "") for right, answer in pairs])
    margins = np.array([answer.margin for answer in answers])
    order = np.argsort(margins, kind="stable")
    margins, gains = margins[order], gains[order]
    has_span = np.isfinite(margins)  # a text without a span has no answer in any case
    margins, gains = margins[has_span], gains[has_span]
    if not margins.size:
        return 0.0
    # Threshold k answers the first k questions.
    cuts = [margins[0] - 1.0, *((margins[:-1] + margins[1:]) / 2), margins[-1] + 1.0]
    # No threshold separates questions with equal margins.
    apart = [True, *(margins[:-1] < margins[1:]), True]
    total = np.where(apart, np.concatenate([[0.0], np.cumsum(gains)]), -np.inf)
    # Equal totals may differ by rounding.
    best = np.flatnonzero(total >= total.max() - 1e-9)
    return float(min((cuts[i] for i in best), key=abs))


def _tokens_of(places: np.ndarray, span: tuple[int, int]) -> tuple[int, int] | None:
    """Finds the first and the last token of a span of characters; None if it has no token."""
    inside = np.flatnonzero((places[:, 1] > span[0]) & (places[:, 0] < span[1]))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def _holds_words(text: str, places: np.ndarray) -> np.ndarray:
    """Returns which spans contain more than white space. [spans, 2, 2] -> bool [spans]"""
    num_visible = np.concatenate([[0], np.cumsum([not char.isspace() for char in text])])  # [n + 1]
    return num_visible[places[:, 1, 1]] > num_visible[places[:, 0, 0]]


def _each_once(scores: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Removes duplicate spans, which several windows contain; the best score is kept."""
    order = np.argsort(-scores, kind="stable")
    _, first = np.unique(places[order][:, (0, 1), (0, 1)], axis=0, return_index=True)
    indices = np.sort(order[first])
    return scores[indices], places[indices]


def _trim(text: str, first: int, last: int) -> tuple[int, int]:
    """Removes the white space at both ends of a span, for which some tokenizers have tokens.

    Combining marks after its last letter belong to it, even if the tokenizer drops them.
    """
    span = text[first:last]
    first, last = first + len(span) - len(span.lstrip()), last - len(span) + len(span.rstrip())
    while first < last < len(text) and unicodedata.category(text[last])[0] == "M":
        last += 1
    return first, last


def _best_spans(
    start: np.ndarray, end: np.ndarray, n_best: int, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Combines the best starts and ends of a window. -> scores [spans], tokens [spans, 2]"""
    firsts = np.argsort(-start, kind="stable")[:n_best]
    lasts = np.argsort(-end, kind="stable")[:n_best]
    pairs = np.stack(np.meshgrid(firsts, lasts, indexing="ij"), -1).reshape(-1, 2)
    length = pairs[:, 1] - pairs[:, 0]
    pairs = pairs[(length >= 0) & (length < longest)]
    return start[pairs[:, 0]] + end[pairs[:, 1]], pairs


class SpanScores(Scores):
    """Scores tokens as start and as end. [B, T, H] -> float32 [B, M, 2], ABSENT = not read"""

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Scores both ends."""
        states = select_positions(hidden, batch.label_pos).astype(jnp.float32)  # [B, M, H]
        scores = score_layer(2)(states)
        if batch.counts is None:
            return scores
        is_read = jnp.arange(scores.shape[1]) < batch.counts[:, None]  # [B, M]
        return jnp.where(is_read[..., None], scores, ABSENT)
