"""Units of a corpus that tasks sample from: neighbours, units of the same or other documents.

Neighbours have similar lengths, so length alone would distinguish them from negatives of any
length. Negatives are therefore in the same length class as the neighbour, and all are truncated to
the shortest: with equal lengths no function of the lengths can prefer one. Classes alone are not
enough: within a class the neighbour is still the nearest to the query. If negatives were the units
nearest to the neighbour in length, the neighbour would be the one in the middle.

Each other document is equally likely, however long it is: the released code pairs each document
with another one of a shuffled copy of the corpus (tools/preprocess_pretrain_data_nsp.py).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from jaxprompt.corpus import Corpus
from jaxprompt.data.text.encoded import Ints
from jaxprompt.errors import InputError

_LENGTH_STEP = 1.25  # from one length class to the next
_MATCHED_ROWS, _ALL_ROWS = 32, 1000  # tried for an example: with matched lengths, in all
_UNIT_TRIES = 8  # random choices for a unit
_DOCUMENT_TRIES = 64  # random choices for a document with units of a length

Example = TypeVar("Example")


class RandomInts:
    """Random integers of one example."""

    def __init__(self, rng: np.random.RandomState):
        """Samples from `rng`, a block at a time."""
        self._rng = rng
        self._buffer: list[float] = []

    def below(self, n: int) -> int:
        """Samples from range(n)."""
        if not self._buffer:
            # In blocks, because a call of numpy takes far longer than a number.
            self._buffer = self._rng.random_sample(64).tolist()
        return int(self._buffer.pop() * n)


class Units:
    """The usable units of some documents, numbered consecutively, document after document."""

    def __init__(
        self,
        corpus: Corpus,
        documents: Ints,
        *,
        min_tokens: int,
        min_units: int,
        max_length: int,
        matched: bool = True,
    ):
        """Drops units below `min_tokens`, then documents with fewer than `min_units` units.

        The units around a dropped unit are neighbours. Lengths from `max_length` on are treated as
        equal. Without `matched` negatives have any length and are not truncated to one length.
        """
        self._corpus, self._min_tokens, self._min_units = corpus, min_tokens, min_units
        self.matched = matched
        self._num_candidates, self.num_short = len(documents), 0
        empty = np.zeros(0, np.int64)
        numbers, lengths, first = [empty], [empty], [0]
        for document in documents:
            sizes = corpus.unit_lengths(document)
            usable = np.flatnonzero(sizes >= min_tokens)
            self.num_short += len(sizes) - len(usable)
            # Negatives of the same document need more than the unit and its neighbours.
            if len(usable) >= min_units:
                numbers.append(usable + corpus.units(document).start)
                lengths.append(sizes[usable])
                first.append(first[-1] + len(usable))
        self._numbers = np.concatenate(numbers)
        self._first = np.array(first, np.int64)
        edges = length_class_edges(min_tokens, max_length) if matched else [min_tokens]
        self._edges = np.array(edges)
        classes = self._edges.searchsorted(np.concatenate(lengths), side="right") - 1
        self._classes = classes.astype(np.int16)

    def __len__(self) -> int:
        """Returns the number of units."""
        return len(self._numbers)

    @property
    def documents(self) -> int:
        """The number of documents in use."""
        return len(self._first) - 1

    def check_documents(self, count: int, task: str) -> None:
        """Raises InputError if a task needs more documents than there are."""
        if self.documents < count:
            raise InputError(
                f"only {self.documents} of {self._num_candidates} documents have "
                f"{self._min_units} units of {self._min_tokens} tokens or more, but {task} needs "
                f"{count} such documents; set corpus.units=sentence if a document is one "
                "paragraph, raise corpus.held_out if these are held out, or add text"
            )

    def summary(self) -> str:
        """Returns a message with what is used and what is excluded."""
        return (
            f"{len(self):,} units of {self.documents:,} documents; excluded: {self.num_short:,} "
            f"units below {self._min_tokens} tokens, {self._num_candidates - self.documents:,} "
            f"documents with fewer than {self._min_units} other units"
        )

    def ids(self, unit: int) -> np.ndarray:
        """Returns the token ids of a unit. [tokens]"""
        return self._corpus.unit(int(self._numbers[unit]))

    def document(self, unit: int) -> int:
        """Returns the document of a unit, counted among those in use."""
        return int(self._first.searchsorted(unit, side="right")) - 1

    def span(self, document: int) -> range:
        """Returns the units of a document."""
        return range(int(self._first[document]), int(self._first[document + 1]))

    def length_class(self, length: int) -> int:
        """Returns the class of a length."""
        return max(int(self._edges.searchsorted(length, side="right")) - 1, 0)

    def same_length(self, span: range, unit: int, max_class: int) -> np.ndarray:
        """Finds a span's units in the length class of `unit`.

        Classes from `max_class` on count as one.
        """
        classes = np.minimum(self._classes[span.start : span.stop], max_class)
        return span.start + (classes == min(self._classes[unit], max_class)).nonzero()[0]


class UnitTask:
    """A task with a row for each unit in use."""

    units: Units

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.units)

    def summary(self) -> str:
        """Returns a message with what is used and what is excluded."""
        return self.units.summary()


class Query:
    """A unit, its neighbour, and the negatives that are sampled for it.

    No text occurs in an example twice, and that of the other neighbour does not occur. Texts are
    truncated to `max_tokens`.
    """

    def __init__(
        self, units: Units, unit: int, random: RandomInts, *, max_tokens: int, matched: bool
    ):
        """Samples the neighbour. Without `matched` the negatives have any length."""
        self._units, self._random, self._max_tokens = units, random, max_tokens
        document = units.document(unit)
        self._span, self._used_documents = units.span(document), {document}
        self._neighbours = [i for i in (unit - 1, unit + 1) if i in self._span]
        self.unit = unit
        self.neighbour = self._neighbours[random.below(len(self._neighbours))]
        # 0 makes all length classes one.
        self._max_class = units.length_class(max_tokens) if matched else 0
        self._used_texts = set(self._truncated((unit, *self._neighbours), max_tokens))

    def same(self, count: int) -> list[int] | None:
        """Samples units of the same document that are not neighbours; None if too few."""
        candidates = self._matching(self._span)
        return self._sample(count, candidates[np.abs(candidates - self.unit) > 1])

    def other(self, count: int) -> list[int] | None:
        """Samples units of another document, a new one in each call; None if not found."""
        for _ in range(_DOCUMENT_TRIES):
            document = self._random.below(self._units.documents)
            if document in self._used_documents:
                continue
            # Not tried again, even if it has too few units.
            self._used_documents.add(document)
            units = self._sample(count, self._matching(self._units.span(document)))
            if units is not None:
                return units
        return None

    def texts(self, units: Sequence[int]) -> list[np.ndarray] | None:
        """Returns the token ids of units, truncated, to one length if lengths are matched.

        Returns None if truncation makes two of them equal, or one equal to the query or to the
        other neighbour.
        """
        texts = [self._units.ids(unit)[: self._max_tokens] for unit in units]
        length = min(map(len, texts)) if self._units.matched else self._max_tokens
        query, *neighbours = self._truncated((self.unit, *self._neighbours), length)
        used = {query, *neighbours}
        for unit, text in zip(units, self._truncated(units, length), strict=True):
            if text == query or (unit != self.neighbour and text in used):
                return None
            used.add(text)
        return [text[:length] for text in texts]

    def _matching(self, span: range) -> np.ndarray:
        return self._units.same_length(span, self.neighbour, self._max_class)

    def _sample(self, count: int, candidates: np.ndarray) -> list[int] | None:
        """Samples units whose texts are new; None if not found."""
        sampled: list[int] = []
        for _ in range(_UNIT_TRIES * count if len(candidates) else 0):
            unit = int(candidates[self._random.below(len(candidates))])
            (text,) = self._truncated([unit], self._max_tokens)
            if text not in self._used_texts:
                self._used_texts.add(text)
                sampled.append(unit)
                if len(sampled) == count:
                    return sampled
        return None

    def _truncated(self, units: Iterable[int], length: int) -> list[bytes]:
        return [self._units.ids(unit)[:length].tobytes() for unit in units]


def first_example(
    sample: Callable[[int, bool], Example | None], row: int, num_rows: int
) -> Example:
    """Returns the first example that `sample(row, matched)` returns, starting at `row`.

    A row is skipped, whatever its label would be, if there are no units as long as its neighbour;
    if that continues, they may have any length.
    """
    for step in range(_ALL_ROWS):
        example = sample((row + step) % num_rows, step < _MATCHED_ROWS)
        if example is not None:
            return example
    raise InputError(
        f"no example was found in {_ALL_ROWS} units: documents repeat the same text; remove the "
        "duplicates from the corpus"
    )


def length_class_edges(min_length: int, max_length: int) -> list[int]:
    """Returns the shortest length of each class."""
    edges = [min_length]
    while edges[-1] < max_length:
        # At least a token more, as 1.25 times a short length is the same length.
        edges.append(min(max(edges[-1] + 1, int(edges[-1] * _LENGTH_STEP)), max_length))
    return edges
