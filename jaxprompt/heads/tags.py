"""A tag for every word, as of named entities (Liu et al. 2022, "P-Tuning v2", section 3.2).

A word is read at its first subword. A text that is longer than a row is read in windows.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.data.encode import ExampleEncoder
from jaxprompt.data.encoded import Split
from jaxprompt.data.tags import lenient_entities
from jaxprompt.data.tasks import Example, Task
from jaxprompt.data.template import Template
from jaxprompt.data.windows import cut_windows
from jaxprompt.errors import InputError, check_share
from jaxprompt.heads import BackboneFacts, HeadLayout, Kind, TaskSetup
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.reading import Scores, take
from jaxprompt.scoring import metrics
from jaxprompt.scoring.losses import per_token
from jaxprompt.types import Batch, Objective


class Windows(NamedTuple):
    """How texts were cut into windows."""

    owner: np.ndarray  # int32 [windows], the text of each
    first: np.ndarray  # int32 [windows], the first word that it reads
    words: list[int]  # of each text, how many
    gold: list[tuple[str, ...]]  # of each text its tags, () = unknown
    names: tuple[str, ...]  # of the tags


@dataclasses.dataclass(frozen=True)
class Head(Kind):
    """A linear layer on the first subword of every word."""

    OF: ClassVar[str] = "tags"
    COLUMNS: ClassVar[tuple[str, ...]] = ("prediction", "entities")

    dropout: float = 0.1  # before the linear layer
    stride: int = 32  # tokens that windows of a long text share, at most half of one

    def check(self) -> None:
        """Raises InputError for what is out of range."""
        check_share("head.dropout", self.dropout)
        if self.stride < 0:
            raise InputError(f"head.stride={self.stride} must be at least 0")

    def check_backbone(self, facts: BackboneFacts) -> None:
        """Raises InputError for a backbone that does not read a text both ways."""
        self.check_encoder(facts, "word")

    def check_template(self, template: Template) -> None:
        """Raises InputError for a template in which the words do not stand once."""
        found = [part for part in template.parts if part.kind == "field"]
        if len(found) != 1 or found[0].modifiers:
            raise InputError(
                f"template {template.source!r} must hold the words once and as they are, as in "
                f"'{{{template.fields[0]}}}'"
            )

    def lay_out(self, facts: BackboneFacts, asked: TaskSetup, tokenizer: Any) -> HeadLayout:
        """Reads every word at its first subword."""
        specials = self.specials(facts, asked, tokenizer)
        return HeadLayout(self, {"main": TagScores(len(asked.task.labels), self.dropout)}, specials)

    def encode(
        self, encoder: ExampleEncoder, task: Task, examples: Sequence[Example], *, classes: int,
        targets: bool,
    ) -> Split:  # fmt: skip
        """Encodes texts, each in as many windows as it takes."""
        del classes, targets
        (field,) = task.fields
        index = {name: number for number, name in enumerate(task.labels)}
        rows, owner, first, labels = [], [], [], []
        words = list({word: 0 for example in examples for word in example.words})
        tokens = dict(zip(words, encoder.tokenise(words), strict=True))
        pairs = zip(examples, encoder.gaps(examples, field), strict=True)
        for number, (example, gap) in enumerate(pairs):
            pieces = [tokens[word] or [encoder.tokenizer.unk_token_id] for word in example.words]
            for window in cut_windows([len(ids) for ids in pieces], gap.room, self.stride):
                own = pieces[window.first : window.last]
                ids = [token for word in own for token in word][: gap.room]
                row, at = encoder.place(gap, ids)
                starts = at + np.cumsum([0, *(len(word) for word in own[:-1])])
                read = slice(window.read - window.first, window.end - window.first)
                cut = sum(map(len, own)) > gap.room
                rows.append([row._replace(label_pos=starts[read].astype(np.int32), cut=cut)])
                owner.append(number)
                first.append(window.read)
                labels.append([index[tag] for tag in example.tags[window.read : window.end]])
        table = np.full((len(rows), max(len(row[0].label_pos) for row in rows)), -1, np.int32)
        for row, own in zip(table, labels, strict=True):
            row[: len(own)] = own
        counts = np.array([len(row[0].label_pos) for row in rows], np.int32)
        parts = Windows(
            np.array(owner, np.int32), np.array(first, np.int32),
            [len(example.words) for example in examples], [e.tags for e in examples], task.labels,
        )  # fmt: skip
        return Split(rows, table, counts, [()] * len(examples), parts)

    def made_up(self, task: Task, text: str, max_target: int) -> Example:
        """Makes up a text as long as can be."""
        words = tuple(text.split())
        return Example({task.fields[0]: text}, words=words, tags=("O",) * len(words))

    def objectives(self, smoothing: float) -> list[Objective]:
        """Makes the cross entropy of every word's tag."""

        def loss(scores, labels, weights):
            return per_token(scores, labels, weights, smoothing=smoothing)

        return [Objective("main", loss)]

    def tell(self, task: Task, classes: int, splits: Mapping[str, Split]) -> list[str]:
        """Says which entities there are, how many of each, and how many texts take windows."""
        lines = []
        for name, split in splits.items():
            kinds = (e.type for tags in split.parts.gold for e in lenient_entities(tags))
            found = sorted(Counter(kinds).items())
            shown = ", ".join(f"{kind} {count:,}" for kind, count in found) or "none"
            longer = int((np.bincount(split.parts.owner) > 1).sum())
            windows = f"; {longer} texts are read in windows" * (longer > 0)
            lines.append(f"entities in {name}: {shown}{windows}")
        return lines

    def measure(self, metric: str, split: Split, found: Any, classes: int) -> dict[str, float]:
        """Compares entities."""
        tags = [tags for tags, _ in self._read(split, found)]
        return metrics.score_tags(metric, split.parts.gold, tags)

    def measure_known(
        self, metric: str, split: Split, found: Any, classes: int
    ) -> tuple[dict[str, float], int]:
        """Compares the entities of the texts whose tags are known."""
        pairs = zip(split.parts.gold, self._read(split, found), strict=True)
        known = [(gold, tags) for gold, (tags, _) in pairs if gold]
        if not known:
            return {}, 0
        return metrics.score_tags(metric, *zip(*known, strict=True)), len(known)

    def answers(
        self, task: Task, examples: Sequence[Example], split: Split, found: Any, classes: int
    ) -> Iterator[dict[str, Any]]:
        """Yields the tags of the words, and the entities with the characters that they span.

        The score of an entity is the mean of its words' probabilities.
        """
        for example, (tags, chances) in zip(examples, self._read(split, found), strict=True):
            (text,) = example.fields.values()
            spans = _spans(text, example.words)
            entities = [
                {
                    "type": kind,
                    "text": text[spans[start][0] : spans[end - 1][1]],
                    "start": spans[start][0],
                    "end": spans[end - 1][1],
                    "score": float(np.mean(chances[start:end])),
                }
                for kind, start, end in lenient_entities(tags)
            ]
            yield {"prediction": tags, "entities": entities}

    def _read(self, split: Split, found: np.ndarray) -> Iterator[tuple[list[str], np.ndarray]]:
        """Yields each text's tags and their probabilities; `found` is [windows, M, C]."""
        parts = split.parts
        best = found.argmax(-1)  # [windows, M]
        top = found.max(-1, keepdims=True)
        chances = 1 / np.exp(found - top).sum(-1)  # of the best
        starts = np.searchsorted(parts.owner, np.arange(len(parts.words) + 1))
        for number, words in enumerate(parts.words):
            tags, own = np.zeros(words, np.int32), np.zeros(words, np.float32)
            for window in range(starts[number], starts[number + 1]):
                first, count = parts.first[window], split.counts[window]
                tags[first : first + count] = best[window, :count]
                own[first : first + count] = chances[window, :count]
            yield [parts.names[tag] for tag in tags], own


def _spans(text: str, words: Sequence[str]) -> list[tuple[int, int]]:
    """Finds the characters of each word in the text that they were read from."""
    found, at = [], 0
    for word in words:
        at = text.index(word, at)
        found.append((at, at + len(word)))
        at += len(word)
    return found


class TagScores(Scores):
    """Scores the tags of the words that are read. [B, T, H] -> float32 [B, M, C]"""

    classes: int
    dropout: float = 0.1

    @nn.compact
    def __call__(self, hidden, batch: Batch, injection, backbone, *, deterministic: bool):
        """Scores the tags."""
        read = take(hidden, batch.label_pos).astype(jnp.float32)  # [B, M, H]
        read = Dropout(self.dropout)(read, deterministic=deterministic)
        return nn.Dense(self.classes, kernel_init=nn.initializers.normal(0.02), name="out")(read)
