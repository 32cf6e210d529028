"""Encoded rows and splits, which batches are made of, and the references for metrics."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

Item = TypeVar("Item")
Ints = Sequence[int] | np.ndarray
Answers: TypeAlias = np.ndarray | list[str]  # scores [units, C], or texts


class Row(NamedTuple):
    """One stream of one row, without padding. All arrays are [T]."""

    ids: np.ndarray  # int32, the pad id where a soft token stands
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
    whole = lambda values: np.array(values, np.int32)
    return Row(
        whole(ids), whole(slots), whole(types), np.array(roles, np.int8), whole(positions)
    )  # fmt: skip


class Encoded(NamedTuple):
    """One row of input without padding. All arrays are [T] but label_pos and targets, [M]."""

    ids: np.ndarray
    slot: np.ndarray
    types: np.ndarray
    roles: np.ndarray
    positions: np.ndarray
    label_pos: np.ndarray  # int32, what the head reads, in the decoder where there is one
    decoder: Row | None = None
    targets: np.ndarray | None = None  # int32, the token that each label_pos predicts: free text
    segments: np.ndarray | None = None  # int32, see Tokens
    num_choices: int = 0  # that the example has, of which one is the class; 0 = all classes
    cut: bool = False  # whether some of the text did not fit into max_len


class Judged(NamedTuple):
    """What metrics for relations and questions need of a split's examples, besides labels."""

    names: tuple[str, ...]  # of the classes
    negative: int  # the class that is no relation, -1 = there is none
    right: Sequence[tuple[int, ...]]  # all classes that are right
    told: Sequence[tuple[int, ...]]  # of a dialogue up to some turn: those of them that it tells
    pairs: Sequence[int]  # and the number of its pair of entities
    unmarked: int = 0  # examples with an entity that is not marked: it stands nowhere by itself
    questions: Sequence[str] = ()  # which question each is an answer of
    candidates: Sequence[str] = ()  # and the text of that answer
    positive: int = 1  # index of the positive class of binary metrics

    def take(self, chosen: Sequence[bool] | np.ndarray) -> "Judged":
        """Returns a selection of the examples."""
        return self._replace(
            right=_taken(self.right, chosen),
            told=_taken(self.told, chosen),
            pairs=_taken(self.pairs, chosen),
            questions=_taken(self.questions, chosen),
            candidates=_taken(self.candidates, chosen),
        )


def _taken(values: Sequence[Item], chosen: Sequence[bool] | np.ndarray) -> Sequence[Item]:
    """Takes some values; of none there is nothing to take."""
    return [values[row] for row, is_in in enumerate(chosen) if is_in] if values else values


class Split(NamedTuple):
    """One split, encoded. A unit is one entry of a batch, usually an example."""

    rows: list[list[Encoded]]  # units, K rows each
    labels: np.ndarray  # int32 [units] or [units, M], -1 = unknown; float32, numbers, NaN = unknown
    counts: np.ndarray  # int32 [units], classes that the unit has: its choices, or all
    references: list[tuple[str, ...]]  # of each example, what a free text may say
    parts: Any = None  # a kind of answer's own: how examples were cut into units
    samples: int = 1  # units that are one example with other demonstrations, side by side
    judged: Judged | None = None  # of the examples of tasks with classes

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.references)

    def by_example(self) -> list[list[Encoded]]:
        """Joins the rows of the units that belong to one example."""
        count = self.samples
        joined = range(0, len(self.rows), count)
        return [[row for unit in self.rows[i : i + count] for row in unit] for i in joined]

    def without_samples(self) -> "Split":
        """Keeps the first unit of each example."""
        if self.samples == 1:
            return self
        step = slice(None, None, self.samples)
        return self._replace(
            rows=self.rows[step], labels=self.labels[step], counts=self.counts[step], samples=1
        )

    def average(self, found: Answers) -> Answers:
        """Averages scores over the samples of an example: [units, ...] to [examples, ...].

        Scores are log-probabilities, so the best class is that of the averaged logits.
        """
        if self.samples == 1 or isinstance(found, list):
            return found
        apart = np.asarray(found, np.float64).reshape(-1, self.samples, *found.shape[1:])
        return apart.mean(1).astype(np.float32)

    def digest(self) -> str:
        """Returns a checksum of the encoded rows and labels: the same for the same data."""
        total = zlib.crc32(self.labels.tobytes())
        for row in (row for unit in self.rows for row in unit):
            parts = (row.ids, row.slot, row.label_pos) + ((row.decoder.ids,) if row.decoder else ())
            for part in parts:
                total = zlib.crc32(np.ascontiguousarray(part).data, total)
        return f"{len(self.rows)} examples, CRC {total:08x}"


def count_cut(rows: Sequence[Sequence[Encoded]]) -> int:
    """Counts the examples with a truncated text. `rows`: examples, K rows each."""
    return sum(any(row.cut for row in example) for example in rows)
