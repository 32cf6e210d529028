"""Encoded rows and splits, from which batches are made, and what metrics need of them."""

import itertools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Ints = Sequence[int] | np.ndarray


class GeneratedText(NamedTuple):
    """One generated text."""

    text: str
    tokens: tuple[str, ...] = ()  # with their log-probabilities, if these were requested
    logprobs: tuple[float, ...] = ()


# Scores [units, C], or generated texts, of each example as many samples.
Predictions: TypeAlias = np.ndarray | list[tuple[GeneratedText, ...]]


class Row(NamedTuple):
    """One stream of one row, without padding. All arrays are [T]."""

    ids: np.ndarray  # int32, the pad id at soft tokens
    slot: np.ndarray  # int32, -1 = none
    types: np.ndarray  # int32
    roles: np.ndarray  # int8, Role
    positions: np.ndarray  # int32
    segments: np.ndarray | None = None  # int32, see Tokens


def make_row(
    ids: Ints,
    slots: Ints,
    types: Ints,
    roles: Ints,
    positions: Ints,
) -> Row:
    """Makes a row from lists of equal length."""
    return Row(
        np.array(ids, np.int32),
        np.array(slots, np.int32),
        np.array(types, np.int32),
        np.array(roles, np.int8),
        np.array(positions, np.int32),
    )


class Encoded(NamedTuple):
    """One row of input without padding. All arrays are [T] but label_pos and targets, [M]."""

    ids: np.ndarray
    slot: np.ndarray
    types: np.ndarray
    roles: np.ndarray
    positions: np.ndarray
    label_pos: np.ndarray  # int32, positions that the head reads, in the decoder if there is one
    decoder: Row | None = None
    targets: np.ndarray | None = None  # int32, free text: the token that each label_pos predicts
    segments: np.ndarray | None = None  # int32, see Tokens
    num_choices: int = 0  # choices of the example, one of which is its class; 0 = all classes
    cut: int = 0  # tokens of texts left out to fit max_len; with demonstrations, 1 = any

    @property
    def is_unlearned(self) -> bool:
        """Whether it has targets, but none that fits max_len."""
        return self.targets is not None and not np.any(self.targets >= 0)


class MetricData(NamedTuple):
    """What metrics for relations and questions need besides labels; sequences are by example."""

    names: tuple[str, ...]  # of the classes
    negative: int  # the class for no relation, -1 = there is none
    correct: Sequence[tuple[int, ...]]  # all correct classes
    expressed: Sequence[tuple[int, ...]]  # those that a dialogue up to some turn expresses
    pairs: Sequence[int]  # index of the pair of entities in a dialogue
    unmarked: int = 0  # examples with an entity that does not occur as whole words in its text
    questions: Sequence[str] = ()  # id of the question that the example answers
    candidates: Sequence[str] = ()  # text of that answer
    positive: int = 1  # index of the positive class of binary metrics

    def select(self, mask: Sequence[bool] | np.ndarray) -> "MetricData":
        """Returns the data of the examples in a mask."""
        parts: dict[str, Any] = {
            name: list(itertools.compress(getattr(self, name), mask)) for name in _BY_EXAMPLE
        }
        return self._replace(**parts)


_BY_EXAMPLE = ("correct", "expressed", "pairs", "questions", "candidates")  # of MetricData


def join_metric_data(parts: Sequence[MetricData]) -> MetricData:
    """Joins the data of parts of the input, in order."""
    joined: dict[str, Any] = {
        name: list(itertools.chain.from_iterable(getattr(part, name) for part in parts))
        for name in _BY_EXAMPLE
    }
    return parts[0]._replace(**joined, unmarked=sum(part.unmarked for part in parts))


class Split(NamedTuple):
    """One split, encoded. A unit is one entry of a batch, usually an example."""

    rows: list[list[Encoded]]  # units, K rows each
    labels: np.ndarray  # int32 [units] or [units, M], -1 = unknown; float32, numbers, NaN = unknown
    counts: np.ndarray  # int32 [units], classes that the unit has: its choices, or all
    references: list[tuple[str, ...]]  # of each example, the correct free texts
    parts: Any = None  # how a head divided the examples into units
    samples: int = 1  # consecutive units that are one example with different demonstrations
    metric_data: MetricData | None = None  # of tasks with classes

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.references)

    def by_example(self) -> list[list[Encoded]]:
        """Joins the rows of the units that belong to one example."""
        count = self.samples
        starts = range(0, len(self.rows), count)
        return [[row for unit in self.rows[i : i + count] for row in unit] for i in starts]

    def without_samples(self) -> "Split":
        """Keeps the first unit of each example."""
        if self.samples == 1:
            return self
        step = slice(None, None, self.samples)
        return self._replace(
            rows=self.rows[step], labels=self.labels[step], counts=self.counts[step], samples=1
        )

    def repeat(self, count: int) -> "Split":
        """Repeats the rows of each unit, one after another, for samples of generated texts."""
        rows = [row for row in self.rows for _ in range(count)]
        return self._replace(rows=rows, labels=np.repeat(self.labels, count, axis=0))

    def average(self, outputs: Predictions) -> Predictions:
        """Averages scores over the samples of an example: [units, ...] to [examples, ...].

        Scores are log-probabilities, so the best class is that of the averaged logits.
        """
        if self.samples == 1 or isinstance(outputs, list):
            return outputs
        by_example = np.asarray(outputs, np.float64).reshape(-1, self.samples, *outputs.shape[1:])
        return by_example.mean(1).astype(np.float32)

    def digest(self) -> str:
        """Returns a checksum of the encoded rows and labels: the same for the same data."""
        total = zlib.crc32(self.labels.tobytes())
        for row in (row for unit in self.rows for row in unit):
            arrays = (row.ids, row.slot, row.label_pos) + (
                (row.decoder.ids,) if row.decoder else ()
            )
            for array in arrays:
                total = zlib.crc32(np.ascontiguousarray(array).data, total)
        return f"{len(self.rows)} examples, CRC {total:08x}"


def count_cut(rows: Sequence[Sequence[Encoded]]) -> int:
    """Counts the examples with a truncated text. `rows`: examples, K rows each."""
    return sum(any(row.cut for row in example) for example in rows)
