"""Batches of an objective's rows from an indexed corpus, each from its number alone."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from jaxprompt.corpus import Corpus, Shuffle
from jaxprompt.corpus.denoise.pack import cut, plan_rows
from jaxprompt.corpus.denoise.rows import Objective, encoded, own_part, row_rng
from jaxprompt.data.batches.batching import collate
from jaxprompt.data.batches.stream import ENDLESS, BatchStream
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.types import Batch


class Rows(Protocol):
    """Rows of text by number, each made for one visit."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def batch(
        self, rows: Sequence[int], visits: Sequence[int], seed: int, *, size: int,
        share: tuple[int, int] = ...,
    ) -> Batch:  # fmt: skip
        """Builds a batch of `size` rows, or the part `share` (index, number of parts) of it."""


class DenoisingRows:
    """Rows that documents are divided into once; each visit masks a row at random."""

    def __init__(
        self, corpus: Corpus, documents: Sequence[int], objective: Objective, *, packed: bool,
        pad_id: int,
    ):  # fmt: skip
        """Plans the rows of `documents`, in order. Raises InputError if there are none."""
        self._corpus, self._objective, self._pad_id = corpus, objective, pad_id
        self._documents = np.fromiter(documents, np.int64, len(documents))
        lengths = corpus.lengths()[self._documents] + len(objective.tail)
        # Lengths alone decide: planning reads where units begin, never the tokens themselves.
        self._plan = plan_rows(lengths, objective.fit, packed=packed)

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._plan)

    def batch(
        self, rows: Sequence[int], visits: Sequence[int], seed: int, *, size: int,
        share: tuple[int, int] = (0, 1),
    ) -> Batch:  # fmt: skip
        """Builds a batch of `size` rows, or the part `share` (index, number of parts) of it.

        Each row is sampled by (seed, its visit). Missing rows are padding of weight 0.
        """
        mine, pairs = own_part(size, share), list(zip(rows, visits, strict=True))
        made = [self._make(*pair, seed) for pair in pairs[mine]]
        inner = self._objective.lengths[1:]
        return collate(
            [[row] for row in made], np.zeros(len(made), np.int32), rows[mine],
            # As many rows in every process, also where the last batch leaves one of them none.
            batch=mine.stop - mine.start,
            length=self._objective.lengths[0], pad_id=self._pad_id,
            label_width=self._objective.reads, decoder_length=inner[0] if inner else 0,
            # A process without a row of its own still needs arrays of the others' form.
            like=made[0] if made else self._make(*pairs[0], seed),
        )  # fmt: skip

    def _make(self, row: int, visit: int, seed: int) -> Encoded:
        pieces = [
            cut(self._corpus.tokens(int(self._documents[at])), start, stop, self._objective.tail)
            for at, start, stop in self._plan.row(row)
        ]
        return encoded(self._objective(pieces, row_rng(seed, visit)))


class Visits(BatchStream):
    """Endless batches: each epoch visits every row once, in a new order.

    Prefetched by grain's threads. Everything depends only on (seed, number of the batch).
    """

    def __init__(
        self, rows: Rows, *, batch: int, seed: int, share: tuple[int, int] = (0, 1),
        prefetch: int = 4,
    ):  # fmt: skip
        """Starts at batch 0; `prefetch` batches are made ahead, 0 = in the caller's thread."""
        self._rows, self._batch, self._seed, self._share = rows, batch, seed, share
        # Two: batches made ahead lie on both sides of the end of an epoch.
        self._order = lru_cache(maxsize=2)(lambda epoch: Shuffle(len(rows), seed, epoch))
        self.steps_per_epoch = -(-len(rows) // batch)
        settings = {"rows": len(rows), "batch": batch, "seed": seed}
        super().__init__(self._at, ENDLESS, prefetch, settings, "corpus and")

    def _at(self, step: int) -> Batch:
        epoch, number = divmod(step, self.steps_per_epoch)
        places = range(number * self._batch, min((number + 1) * self._batch, len(self._rows)))
        order = self._order(epoch)
        return self._rows.batch(
            # Visits are numbered through all epochs, so each epoch hides other tokens of a row.
            [order[place] for place in places], [epoch * len(self._rows) + at for at in places],
            self._seed, size=self._batch, share=self._share,
        )  # fmt: skip


class Pass:
    """One pass over the first rows of a plan, with the same random choices in every pass."""

    def __init__(
        self,
        rows: Rows,
        *,
        batch: int,
        seed: int,
        limit: int,
        share: tuple[int, int] = (0, 1),
    ):
        """Takes at most `limit` rows."""
        self._rows, self._batch, self._seed, self._share = rows, batch, seed, share
        self.size = min(limit, len(rows))

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches; `Batch.index` is the number of each row."""
        for first in range(0, self.size, self._batch):
            places = list(range(first, min(first + self._batch, self.size)))
            # The row's own number stands for the visit: every pass hides the same tokens, so that
            # losses of one step compare with those of another.
            yield self._rows.batch(places, places, self._seed, size=self._batch, share=self._share)
