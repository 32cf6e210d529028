"""Units of a corpus that tasks sample from: neighbours, units of the same or other documents.

Neighbours have similar lengths, so length alone would distinguish them from negatives of any
length. Negatives are therefore in the same length class as the neighbour, and all are truncated to
the shortest: with equal lengths no function of the lengths can prefer one. Classes alone are not
enough: within a class the neighbour is still the nearest to the query. If negatives were the units
nearest to the neighbour in length, the neighbour would be the one in the middle.

Each other document is equally likely, however long it is: the released code reads each document
beside another of a shuffled copy of the corpus (tools/preprocess_pretrain_data_nsp.py).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from jaxprompt.corpus import Corpus
from jaxprompt.errors import InputError

_STEP = 1.25  # from one class of lengths to the next
_ROWS = (32, 1000)  # tried for an example: within a class of lengths, in all
_TRIES = 8  # draws for a unit
_DOCUMENTS = 64  # draws for a document that has units of a length

Found = TypeVar("Found")


class Draws:
    """Random numbers of one example."""

    def __init__(self, rng: np.random.RandomState):
        """Samples from `rng`, a block at a time."""
        self._rng = rng
        self._left: list[float] = []

    def below(self, n: int) -> int:
        """Samples from range(n)."""
        if not self._left:
            # A call of numpy takes far longer than to make the number.
            self._left = self._rng.random_sample(64).tolist()
        return int(self._left.pop() * n)


class Units:
    """The usable units of some documents, numbered consecutively, document after document."""

    def __init__(
        self, corpus: Corpus, documents: Sequence[int], *, least: int, count: int, cap: int,
        matched: bool = True,
    ):  # fmt: skip
        """Drops units below `least` tokens, then documents with fewer than `count` units.

        The units around a dropped unit are neighbours. Lengths from `cap` on are treated as equal.
        Without `matched` negatives have any length and are not truncated to one length.
        """
        self._corpus, self._least, self._count = corpus, least, count
        self.matched = matched
        self._offered, self.short = len(documents), 0
        none = np.zeros(0, np.int64)
        numbers, lengths, first = [none], [none], [0]
        for document in documents:
            sizes = corpus.unit_lengths(document)
            usable = np.flatnonzero(sizes >= least)
            self.short += len(sizes) - len(usable)
            # Negatives of the same document need more than the unit and its neighbours.
            if len(usable) >= count:
                numbers.append(usable + corpus.units(document).start)
                lengths.append(sizes[usable])
                first.append(first[-1] + len(usable))
        self._numbers = np.concatenate(numbers)
        self._first = np.array(first, np.int64)
        self._edges = np.array(_edges(least, cap) if matched else [least])
        classes = self._edges.searchsorted(np.concatenate(lengths), side="right") - 1
        self._classes = classes.astype(np.int16)

    def __len__(self) -> int:
        """Returns the number of units."""
        return len(self._numbers)

    @property
    def documents(self) -> int:
        """Number of documents in use."""
        return len(self._first) - 1

    def need(self, documents: int, task: str) -> None:
        """Raises InputError if a task needs more documents than there are."""
        if self.documents < documents:
            raise InputError(
                f"only {self.documents} of {self._offered} documents have {self._count} units of "
                f"{self._least} tokens or more, but {task} needs {documents} such documents; set "
                "corpus.units=sentence if a document is one paragraph, raise corpus.held_out if "
                "these are held out, or add text"
            )

    def summary(self) -> str:
        """Returns a message with what is used and what is excluded."""
        return (
            f"{len(self):,} units of {self.documents:,} documents; excluded: {self.short:,} units "
            f"below {self._least} tokens, {self._offered - self.documents:,} documents with fewer "
            f"than {self._count} other units"
        )

    def ids(self, at: int) -> np.ndarray:
        """Returns the token ids of a unit. [tokens]"""
        return self._corpus.unit(int(self._numbers[at]))

    def document(self, at: int) -> int:
        """Returns the document of a unit, counted among those in use."""
        return int(self._first.searchsorted(at, side="right")) - 1

    def span(self, document: int) -> range:
        """Returns the units of a document."""
        return range(int(self._first[document]), int(self._first[document + 1]))

    def class_of(self, length: int) -> int:
        """Returns the class of a length."""
        return max(int(self._edges.searchsorted(length, side="right")) - 1, 0)

    def within(self, span: range, at: int, top: int) -> np.ndarray:
        """Finds a span's units in the length class of `at`; classes from `top` on are one."""
        classes = np.minimum(self._classes[span.start : span.stop], top)
        return span.start + (classes == min(self._classes[at], top)).nonzero()[0]


class OfUnits:
    """A task with a row for each unit in use."""

    units: Units

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.units)

    def summary(self) -> str:
        """Returns a message with what is used and what is excluded."""
        return self.units.summary()


class Query:
    """A unit, its neighbour, and the units sampled beside the neighbour.

    No text occurs in an example twice, nor that of the other neighbour at all; `cut` tokens are
    shown.
    """

    def __init__(self, units: Units, at: int, draws: Draws, *, cut: int, alike: bool):
        """Samples the neighbour. Unless `alike`, the others have any length."""
        self._units, self._draws, self._cut = units, draws, cut
        document = units.document(at)
        self._span, self._barred = units.span(document), {document}
        self._beside = [i for i in (at - 1, at + 1) if i in self._span]
        self.at, self.neighbour = at, self._beside[draws.below(len(self._beside))]
        # 0 makes all classes one, so that any length will do.
        self._top = units.class_of(cut) if alike else 0
        self._shown = set(self._texts((at, *self._beside), cut))

    def same(self, count: int) -> list[int] | None:
        """Samples units of the same document that are not neighbours. None = there are too few."""
        found = self._near(self._span)
        return self._pick(count, found[np.abs(found - self.at) > 1])

    def other(self, count: int) -> list[int] | None:
        """Samples units of another document, a new one in each call."""
        for _ in range(_DOCUMENTS):
            document = self._draws.below(self._units.documents)
            if document in self._barred:
                continue
            found = self._pick(count, self._near(self._units.span(document)))
            # A document stays barred where it has too few: it is not tried again.
            self._barred.add(document)
            if found is not None:
                return found
        return None

    def shown(self, units: Sequence[int]) -> list[np.ndarray] | None:
        """Truncates texts, to one length if requested; returns the ids of each.

        None = after that two are the same, or one is the query's or another neighbour's.
        """
        texts = [self._units.ids(unit)[: self._cut] for unit in units]
        length = min(map(len, texts)) if self._units.matched else self._cut
        # Cut like the options: two texts may become the same only by the cut.
        query, *beside = self._texts((self.at, *self._beside), length)
        known = {query, *beside}
        for unit, text in zip(units, self._texts(units, length), strict=True):
            if text == query or (unit != self.neighbour and text in known):
                return None
            known.add(text)
        return [text[:length] for text in texts]

    def _near(self, span: range) -> np.ndarray:
        return self._units.within(span, self.neighbour, self._top)

    def _pick(self, count: int, units: np.ndarray) -> list[int] | None:
        picked = []
        for _ in range(_TRIES * count if len(units) else 0):
            one = int(units[self._draws.below(len(units))])
            if self._show(one):
                picked.append(one)
                if len(picked) == count:
                    break
        return picked if len(picked) == count else None

    def _show(self, unit: int) -> bool:
        """Shows a text. Returns whether it is new."""
        (text,) = self._texts([unit], self._cut)
        is_new = text not in self._shown
        self._shown.add(text)
        return is_new

    def _texts(self, units: Iterable[int], length: int) -> list[bytes]:
        return [self._units.ids(unit)[:length].tobytes() for unit in units]


def first_found(draw: Callable[[int, bool], Found | None], row: int, rows: int) -> Found:
    """Returns the first example that `draw(row, alike)` makes, starting at a row.

    A row is skipped, whatever its label would be, if there are no units as long as its neighbour;
    if that continues, they may have any length.
    """
    for step in range(_ROWS[1]):
        found = draw((row + step) % rows, step < _ROWS[0])
        if found is not None:
            return found
    raise InputError(
        f"no example was found in {_ROWS[1]} units: documents repeat the same text; remove the "
        "duplicates from the corpus"
    )


def _edges(least: int, cap: int) -> list[int]:
    """Returns the shortest length of each class."""
    edges = [least]
    while edges[-1] < cap:
        # Steps in proportion, but at least a token: 1.25 times a short length is the same length.
        edges.append(min(max(edges[-1] + 1, int(edges[-1] * _STEP)), cap))
    return edges
