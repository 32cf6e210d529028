"""Packs documents into samples of fixed length, from the documents' lengths alone."""

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxprompt.data.text.encoded import Ints
from jaxprompt.errors import InputError


class Capacity(NamedTuple):
    """How much text fits in a sample, in each of its S streams."""

    cost: np.ndarray  # int [S, N + 1] positions that n tokens of a document take, never decreasing
    length: tuple[int, ...]  # [S] positions of a sample
    min_tokens: int = 1  # of a chunk


def seq2seq_capacity(
    lengths_of: Callable[[int], tuple[int, int]],
    tokens: int,
    lengths: tuple[int, int],
    separate: bool,
) -> Capacity:
    """Returns the capacity of samples whose text, of 2 tokens or more, is split into two streams.

    Args:
      lengths_of: the lengths of both streams for a number of tokens.
      tokens: maximum number of tokens of one text.
      lengths: widths of both streams.
      separate: whether each document is divided on its own.
    """
    if not separate:
        return Capacity(np.arange(tokens + 1)[None], (tokens,), min_tokens=2)
    # A chunk has 2 tokens or more; with the entries below them costs never decrease.
    costs = [lengths_of(max(n, 2)) for n in range(tokens + 1)]
    return Capacity(np.array(costs).T, lengths, min_tokens=2)


class Packing(NamedTuple):
    """Chunks of documents; sample i consists of the chunks first[i] to first[i + 1]."""

    first: np.ndarray  # int64 [samples + 1]
    document: np.ndarray  # int64 [chunks]
    start: np.ndarray  # int64 [chunks], first token of the chunk in its document
    stop: np.ndarray  # int64 [chunks]

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.first) - 1

    def chunks(self, index: int) -> list[tuple[int, int, int]]:
        """Lists the chunks of a sample: (document, start, stop)."""
        span = slice(self.first[index], self.first[index + 1])
        columns = (self.document, self.start, self.stop)
        return list(zip(*(column[span].tolist() for column in columns), strict=True))


def pack_documents(lengths: Ints, capacity: Capacity, *, packed: bool = True) -> Packing:
    """Fills samples with documents in their order, greedily.

    A document that is too long for the rest of a sample is split there and continues in the next
    one. Without `packed` a sample has one chunk. Chunks below `capacity.min_tokens` are dropped.
    Raises InputError if no document is that long.
    """
    max_tokens = _max_tokens(capacity)
    min_tokens, streams = capacity.min_tokens, range(len(capacity.length))
    # Lists, because the loop reads single numbers, which is many times slower in numpy.
    cost = capacity.cost.tolist()
    # 8 bytes per number; a list of Python integers would take 36.
    first, documents, starts, stops = (array("q") for _ in range(4))
    free: list[int] = []  # positions in each stream of the current sample
    for document, length in enumerate(np.asarray(lengths).tolist()):
        start = 0
        while length - start >= min_tokens:
            fitting = min(max_tokens[s][free[s]] for s in streams) if free else 0
            # Each objective checks that an empty sample has space for `min_tokens`, so the loop
            # terminates.
            if fitting < min_tokens:
                first.append(len(documents))
                free = list(capacity.length)
                continue
            stop = min(start + fitting, length)
            documents.append(document)
            starts.append(start)
            stops.append(stop)
            # Without free positions, the next chunk starts a new sample.
            free = [free[s] - cost[s][stop - start] for s in streams] if packed else []
            start = stop
    if not documents:
        raise InputError(
            f"none of {len(lengths)} documents has at least {min_tokens} tokens; use documents "
            "with more text"
        )
    first.append(len(documents))
    return Packing(*(np.frombuffer(x, np.int64) for x in (first, documents, starts, stops)))


def slice_document(
    document: np.ndarray, start: int, stop: int, end_ids: tuple[int, ...] = ()
) -> np.ndarray:
    """Returns tokens start to stop of a document followed by `end_ids`, int32 [stop - start]."""
    ids = np.asarray(document[start:stop], np.int32)
    length = len(document)
    if stop <= length:
        return ids
    # The end tokens count as the document's, so that a chunk may end within them.
    return np.append(ids, np.array(end_ids[max(start - length, 0) : stop - length], np.int32))


def _max_tokens(capacity: Capacity) -> list[list[int]]:
    """Tabulates how many tokens fit into each number of positions. [S, length + 1]"""
    tables = []
    for cost, length in zip(capacity.cost, capacity.length, strict=True):
        # The last n with cost[n] <= positions, which needs costs that never decrease; -1 if even
        # the cost of 0 tokens does not fit.
        fitting = np.searchsorted(cost, np.arange(length + 1), side="right") - 1
        tables.append(fitting.tolist())
    return tables
