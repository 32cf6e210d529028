"""A tag for every word: named entities, semantic roles (Liu et al. 2022, "P-Tuning v2", 3.2).

A word is read at its first subword. A text longer than the input is read in windows. The predicate
whose roles are tagged is in every window if the template contains or marks it.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.data.tasks.readers.tagging import word_spans
from jaxprompt.data.tasks.tags import NO_SCHEME, lenient_entities
from jaxprompt.data.tasks.task import PREDICATE, Example, Task
from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.template import Template
from jaxprompt.data.text.tokenizer import Tokenizer
from jaxprompt.data.text.windows import TextWindow
from jaxprompt.errors import InputError, brief
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
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.reading import Scores, score_layer, select_positions
from jaxprompt.scoring import metrics
from jaxprompt.scoring.losses import token_cross_entropy
from jaxprompt.scoring.roles import VERB
from jaxprompt.scoring.viterbi import best_tags
from jaxprompt.types import Batch, Objective

DECODES = ("argmax", "viterbi")


class TaggedWindows(NamedTuple):
    """How texts were cut into windows."""

    owner: np.ndarray  # int32 [windows], index of its text
    gold: list[tuple[str, ...]]  # tags of each text, () = unknown
    names: tuple[str, ...]  # of the tags
    has_predicates: bool = False  # the tags are roles


class MarkedPredicate(NamedTuple):
    """The predicate of a text, between its markers."""

    word: int  # its index; -1 = none is marked
    before: list[int]  # token ids of the marker before it
    after: list[int]  # and of that after it
    ids: list[int]  # of the markers and the predicate


@dataclasses.dataclass(frozen=True)
class Head(WindowHead):
    """A linear layer on the first subword of every word."""

    OF: ClassVar[str] = "tags"
    DEFAULT_STRIDE: ClassVar[int] = 32
    COLUMNS: ClassVar[tuple[str, ...]] = ("prediction", "entities")
    CHANGEABLE: ClassVar[tuple[str, ...]] = ("decode",)

    dropout: float = kinds.option(0.1, "before the linear layer", "in [0, 1)")
    stride: int = kinds.option(
        -1,
        "tokens by which windows of a long text overlap; -1 = 32; at most half a window",
        "at least -1",
    )
    decode: str = kinds.option(
        "argmax",
        "argmax: the best tag of each word; viterbi: the best sequence that IOB2 allows",
        DECODES,
    )

    def check_task(self, task: Task) -> None:
        """Raises InputError for another type of answer, or Viterbi decoding without a scheme."""
        super().check_task(task)
        if self.decode == "viterbi" and task.scheme == NO_SCHEME:
            raise InputError(
                "head.decode=viterbi follows the rules of IOB2, but task.scheme=none has none; use "
                "head.decode=argmax"
            )

    def check_template(self, template: Template) -> None:
        """Raises InputError unless the words are in the template exactly once."""
        fields = [part for part in template.parts if part.kind == "field"]
        words = [part for part in fields if part.text != PREDICATE]
        if len(words) != 1 or words[0].modifiers not in ((), ("marked",)):
            name = next((part.text for part in words), "words")
            raise InputError(
                f"template {template.source!r} must contain the words once and without modifiers, "
                f"as in '{{{name}}}'"
            )

    def lay_out(self, facts: BackboneInfo, setup: TaskSetup, tokenizer: Tokenizer) -> HeadLayout:
        """Reads every word at its first subword."""
        specials = self.specials(facts, setup, tokenizer)
        return HeadLayout(self, {"main": TagScores(len(setup.task.labels), self.dropout)}, specials)

    def encode(
        self,
        encoder: ExampleEncoder,
        task: Task,
        examples: Sequence[Example],
        *,
        classes: int,
        targets: bool,
    ) -> Split:
        """Encodes texts, each in as many windows as needed."""
        (field,) = task.fields
        index = {name: number for number, name in enumerate(task.labels)}
        rows, owner, labels = [], [], []
        # Each distinct word is tokenized once.
        words = list({word: 0 for e in examples for word in (*e.words, *encoder.markers)})
        tokens = dict(zip(words, encoder.tokenise(words), strict=True))
        gaps = encoder.gaps([_with_space(example) for example in examples], field)
        pairs = zip(examples, gaps, strict=True)
        for number, (example, gap) in enumerate(pairs):
            pieces = [
                tokens[word] or _unknown_ids(encoder.tokenizer, word) for word in example.words
            ]
            predicate = MarkedPredicate(-1, [], [], [])
            if encoder.markers:
                before, after = (tokens[marker] for marker in encoder.markers)
                word = _predicate(example, task)
                predicate = MarkedPredicate(word, before, after, [*before, *pieces[word], *after])
            windows, room = self._windows(pieces, predicate, gap.room)
            for window in windows:
                ids, starts = _window_ids(pieces, window, predicate, room)
                row, at = encoder.fill_gap(gap, ids)
                read = slice(window.read - window.first, window.end - window.first)
                label_pos = (at + starts[read]).astype(np.int32)
                # Only a word that is alone in its window can be cut.
                cut = window.last - window.first == 1 and len(pieces[window.first]) > room
                cut = cut and window.first != predicate.word
                rows.append([row._replace(label_pos=label_pos, cut=cut)])
                owner.append(number)
                labels.append([index[tag] for tag in example.tags[window.read : window.end]])
        counts = np.array([len(row[0].label_pos) for row in rows], np.int32)
        table = label_table(labels, counts.max())
        gold, has_predicates = [e.tags for e in examples], bool(task.predicate)
        parts = TaggedWindows(np.array(owner, np.int32), gold, task.labels, has_predicates)
        return Split(rows, table, counts, [()] * len(examples), parts)

    def longest_example(self, task: Task, text: str, max_target: int) -> Example:
        """Returns a text of maximum length."""
        words = tuple(text.split())
        places = tuple(word_spans(text, words)[:1]) if task.predicate else ()
        example = task.example(text)
        return example._replace(words=words, tags=task.labels[:1] * len(words), entities=places)

    def objectives(self, smoothing: float) -> list[Objective]:
        """Returns the cross entropy of every word's tag."""
        return [Objective("main", functools.partial(token_cross_entropy, smoothing=smoothing))]

    def tell(self, task: Task, classes: int, splits: Mapping[str, Split]) -> list[str]:
        """Describes the entities or tags, their counts, and how many texts are split."""
        lines = []
        unit = "tags" if task.scheme == NO_SCHEME else "entities"
        if task.predicate:
            unit = "roles"
        for name, split in splits.items():
            counts = Counter(e for tags in split.parts.gold for e in _types_or_tags(task, tags))
            shown = ", ".join(f"{kind} {counts[kind]:,}" for kind in sorted(counts)) or "none"
            longer = int((np.bincount(split.parts.owner) > 1).sum())
            lines.append(f"{unit} in {name}: {shown}; {longer} texts are split into windows")
        return lines

    def measure(self, metric: str, split: Split, outputs: Any, classes: int) -> dict[str, float]:
        """Compares entities."""
        parts, tags = split.parts, [tags for tags, _ in self._read(split, outputs)]
        return metrics.score_tags(metric, parts.gold, tags, has_predicates=parts.has_predicates)

    def labelled(self, split: Split, outputs: Any, classes: int) -> Labelled:
        """Returns the right and the predicted tags of the texts with known ones."""
        tags = (tags for tags, _ in self._read(split, outputs))
        labelled = select_labelled(split.parts.gold, tags)
        return labelled._replace(has_predicates=split.parts.has_predicates)

    def compare(self, metric: str, labelled: Labelled) -> dict[str, float]:
        """Compares entities."""
        gold, pred, has_predicates = labelled.gold, labelled.pred, labelled.has_predicates
        return metrics.score_tags(metric, gold, pred, has_predicates=has_predicates)

    def columns(self, task: Task) -> tuple[str, ...]:
        """Returns the names of the columns of `answers`."""
        if task.scheme == NO_SCHEME:
            return ("prediction",)
        return ("prediction", "predicate_span", "roles") if task.predicate else self.COLUMNS

    def answers(
        self, task: Task, examples: Sequence[Example], split: Split, outputs: Any, classes: int
    ) -> Iterator[dict[str, Any]]:
        """Yields the tags of the words and, with a scheme, the entities with their characters.

        The score of an entity is the mean of its words' probabilities. For a predicate, its
        position and its roles are included, without the role of the predicate itself.
        """
        for example, (tags, probs) in zip(examples, self._read(split, outputs), strict=True):
            if task.scheme == NO_SCHEME:
                yield {"prediction": tags}
                continue
            text = example.fields[task.fields[0]]
            spans = word_spans(text, example.words)
            entities = [
                {
                    "type": kind,
                    "text": text[spans[start][0] : spans[end - 1][1]],
                    "start": spans[start][0],
                    "end": spans[end - 1][1],
                    "score": float(np.mean(probs[start:end])),
                }
                for kind, start, end in lenient_entities(tags)
            ]
            if not task.predicate:
                yield {"prediction": tags, "entities": entities}
                continue
            word = _predicate(example, task)
            start, end = spans[word]
            place = {"text": text[start:end], "word": word, "start": start, "end": end}
            roles = [entity for entity in entities if entity["type"] != VERB]
            yield {"prediction": tags, "predicate_span": place, "roles": roles}

    def _windows(
        self, pieces: Sequence[Sequence[int]], predicate: MarkedPredicate, room: int
    ) -> tuple[list[TextWindow], int]:
        """Cuts a text into windows, each with room for the predicate between its markers.

        Returns the windows, and the maximum number of tokens of the other words in one.
        """
        lengths = [len(ids) for ids in pieces]
        if predicate.word >= 0:
            # It is in every window, which reduces the room for other words.
            lengths[predicate.word] = 0
            room -= len(predicate.ids)
        if room < 1:
            raise InputError(
                f"the predicate and its markers take {len(predicate.ids)} tokens, which leaves no "
                f"room for other words; raise data.max_len by at least {1 - room}, or leave "
                "task.markers empty"
            )
        return self.cut_windows(lengths, room), room

    def _read(self, split: Split, outputs: np.ndarray) -> Iterator[tuple[list[str], np.ndarray]]:
        """Yields each text's tags and their probabilities; `outputs` is [windows, M, C]."""
        parts = split.parts
        for windows in windows_by_text(parts.owner, len(parts.gold)):
            # Each word is read in one window, and windows are in order.
            scores = np.concatenate([outputs[w, : split.counts[w]] for w in windows])  # [words, C]
            # The maximum is subtracted because exponentials would overflow.
            scores = scores - scores.max(-1, keepdims=True)
            scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
            viterbi = self.decode == "viterbi"
            best = best_tags(scores, parts.names) if viterbi else scores.argmax(-1)
            probs = np.exp(scores[np.arange(len(best)), best])
            yield [parts.names[tag] for tag in best], probs


def _types_or_tags(task: Task, tags: Sequence[str]) -> Iterator[str]:
    """Returns the types of the entities of a text, or its tags."""
    if task.scheme == NO_SCHEME:
        return iter(tags)
    return (entity.type for entity in lenient_entities(tags))


def _with_space(example: Example) -> Example:
    """Puts a space before the predicate, so that a byte-level BPE encodes it as in the sentence."""
    fields = {PREDICATE: f" {example.fields[PREDICATE]}"} if example.entities else {}
    return example._replace(fields=example.fields | fields)


def _predicate(example: Example, task: Task) -> int:
    """Finds the index of the predicate among the words of an example."""
    return word_spans(example.fields[task.fields[0]], example.words).index(example.entities[0])


def _unknown_ids(tokenizer: Tokenizer, word: str) -> list[int]:
    """Returns a token for a word whose characters the tokenizer drops."""
    if tokenizer.unk_token_id is None:
        raise InputError(
            f"the tokenizer has no token for the word {brief(word)} and no unknown token; remove "
            "the word, or use another backbone"
        )
    return [tokenizer.unk_token_id]


def _window_ids(
    pieces: Sequence[Sequence[int]], window: TextWindow, predicate: MarkedPredicate, room: int
) -> tuple[list[int], np.ndarray]:
    """Concatenates the words of a window. -> token ids, index of each word's first token

    A predicate outside of the window is added, marked, at the nearer end, and not read there. A
    word that is longer than `room` is cut.
    """
    ids = predicate.ids.copy() if 0 <= predicate.word < window.first else []
    starts = []
    for word in range(window.first, window.last):
        if word == predicate.word:
            starts.append(len(ids) + len(predicate.before))
            ids += predicate.ids
        else:
            starts.append(len(ids))
            ids += pieces[word][:room]
    if predicate.word >= window.last:
        ids = ids + predicate.ids
    return ids, np.array(starts, np.int64)


class TagScores(Scores):
    """Scores the tags of the words. [B, T, H] -> float32 [B, M, C]"""

    classes: int
    dropout: float = 0.1

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Scores the tags."""
        states = select_positions(hidden, batch.label_pos).astype(jnp.float32)  # [B, M, H]
        states = Dropout(self.dropout)(states, deterministic=deterministic)
        return score_layer(self.classes)(states)
