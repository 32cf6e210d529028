"""Plans which pieces of which documents are in a row, from the documents' lengths alone."""

from array import array
from typing import NamedTuple

import numpy as np

from jaxprompt.data.text.encoded import Ints
from jaxprompt.errors import InputError


class Fit(NamedTuple):
    """How much text fits in a row, in each of its S streams."""

    cost: np.ndarray  # int [S, N + 1] places that n tokens of a document take, never falling in n
    room: tuple[int, ...]  # [S] places of a row
    least: int = 1  # tokens that a piece must have


class Packing(NamedTuple):
    """Pieces of documents, row by row. Row r holds the pieces first[r] to first[r + 1]."""

    first: np.ndarray  # int64 [R + 1]
    document: np.ndarray  # int64 [pieces]
    start: np.ndarray  # int64 [pieces], a piece's tokens are start to stop of its document
    stop: np.ndarray  # int64 [pieces]

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.first) - 1

    def row(self, index: int) -> list[tuple[int, int, int]]:
        """Lists the pieces of a row: (document, start, stop)."""
        at = slice(self.first[index], self.first[index + 1])
        parts = (self.document, self.start, self.stop)
        return list(zip(*(part[at].tolist() for part in parts), strict=True))


def plan_rows(lengths: Ints, fit: Fit, *, packed: bool = True) -> Packing:
    """Fills rows with documents in their order, greedily.

    A document that is too long for the rest of a row is split there and continues in the next row.
    Without `packed` a row has one piece. Pieces below `fit.least` tokens are dropped. Raises
    InputError if no document is that long.
    """
    most = _most(fit)
    least, streams = fit.least, range(len(fit.room))
    # Lists, because the loop reads single numbers, which numpy hands out many times slower.
    cost = fit.cost.tolist()
    # 8 bytes per number; a list of Python's integers would take 36.
    first, documents, starts, stops = (array("q") for _ in range(4))
    left: list[int] = []  # places left in each stream of the open row
    for document, length in enumerate(np.asarray(lengths).tolist()):
        start = 0
        while length - start >= least:
            fits = min(most[s][left[s]] for s in streams) if left else 0
            # An empty row holds `least` tokens, as `_most` has checked, so the loop always gets on.
            if fits < least:
                first.append(len(documents))
                left = list(fit.room)
                continue
            stop = min(start + fits, length)
            documents.append(document)
            starts.append(start)
            stops.append(stop)
            # Nothing left makes the next piece open a row.
            left = [left[s] - cost[s][stop - start] for s in streams] if packed else []
            start = stop
    if not documents:
        raise InputError(
            f"none of {len(lengths)} documents has at least {least} tokens; use documents with "
            "more text"
        )
    first.append(len(documents))
    return Packing(*(np.frombuffer(x, np.int64) for x in (first, documents, starts, stops)))


def cut(document: np.ndarray, start: int, stop: int, tail: tuple[int, ...] = ()) -> np.ndarray:
    """Returns tokens start to stop of a document that ends with `tail`, int32 [stop - start]."""
    ids = np.asarray(document[start:stop], np.int32)
    # The tail counts among the document's tokens here, so that a piece may end inside of it.
    end = len(document)
    if stop <= end:
        return ids
    return np.append(ids, np.array(tail[max(start - end, 0) : stop - end], np.int32))


def _most(fit: Fit) -> list[list[int]]:
    """Tabulates how many tokens fit into each number of places. [S, room + 1]"""
    found = []
    for cost, room in zip(fit.cost, fit.room, strict=True):
        # The last n with cost[n] <= places, which needs costs that never fall; -1 where not even
        # the cost of no token fits.
        found.append((np.searchsorted(cost, np.arange(room + 1), side="right") - 1).tolist())
    if min(row[-1] for row in found) < fit.least:
        raise InputError(
            f"rows of {fit.room} tokens cannot hold {fit.least} tokens of text; raise data.max_len"
        )
    return found
