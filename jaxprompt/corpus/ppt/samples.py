"""Batches of a pre-training task's examples, each from its number alone."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxprompt.corpus import Shuffle
from jaxprompt.corpus.denoise.samples import process_slice, sample_rng
from jaxprompt.corpus.ppt.forms import Forms
from jaxprompt.data.batches.batching import Layout, collate
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.types import Batch


class PptTask(Protocol):
    """A pre-training task: examples by row."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def __call__(self, row: int, rng: np.random.RandomState) -> tuple[Encoded, int]:
        """Makes an example and its label, a pure function of the row and the random state."""


class PptSamples:
    """The rows of a task for `Visits` and `Pass`; each visit samples its example again."""

    def __init__(self, task: PptTask, forms: Forms, layout: Layout):
        """Takes a task, and the layout of rows; size and share come with each batch."""
        self._task, self._layout = task, layout
        # A Pass takes the first rows, which then are of many documents.
        # The seed is fixed, so that runs of any seed are evaluated on the same rows.
        self._order = Shuffle(len(task), 0)
        form = next(iter(forms.forms.values()))
        self._reads, self._decoder_length = form.reads, form.decoder_length

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._task)

    def batch(
        self, rows: Sequence[int], visits: Sequence[int], seed: int, *, size: int,
        share: tuple[int, int] = (0, 1),
    ) -> Batch:  # fmt: skip
        """Builds a batch of `size` rows, or the part `share` (index, number of parts) of it.

        Each row is sampled by (seed, its visit). Missing rows are padding of weight 0.
        """
        mine, pairs = process_slice(size, share), list(zip(rows, visits, strict=True))
        made = [self._make(*pair, seed) for pair in pairs[mine]]
        like, _ = made[0] if made else self._make(*pairs[0], seed)
        at = self._layout
        return collate(
            [[row] for row, _ in made], [label for _, label in made], rows[mine],
            batch=mine.stop - mine.start,
            length=at.length(at.max_len), pad_id=at.pad_id, label_width=self._reads, side=at.side,
            shift=at.shift, branches=at.branches, decoder_length=self._decoder_length,
            decoder_shift=at.decoder_shift, like=like,
        )  # fmt: skip

    def _make(self, row: int, visit: int, seed: int) -> tuple[Encoded, int]:
        return self._task(self._order[row], sample_rng(seed, visit))
