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
    """A pre-training task with a number of examples."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def __call__(self, row: int, rng: np.random.RandomState) -> tuple[Encoded, int]:
        """Makes an example and its label, a pure function of the row and the random state."""


class PptSamples:
    """The examples of a task as a SampleSource; each visit samples its example again."""

    def __init__(self, task: PptTask, forms: Forms, layout: Layout):
        """Takes a task and the layout of its rows."""
        self._task, self._layout = task, layout
        # Shuffled, so that EvalBatches, which takes the first rows, has many documents. The seed is
        # fixed, so that runs of any seed are evaluated on the same rows.
        self._order = Shuffle(len(task), 0)
        form = next(iter(forms.forms.values()))
        self._label_width, self._decoder_length = form.label_width, form.decoder_length

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._task)

    def batch(
        self, indices: Sequence[int], visits: Sequence[int], seed: int, *, size: int,
        share: tuple[int, int] = (0, 1),
    ) -> Batch:  # fmt: skip
        """Builds a batch of `size` examples, or the part `share` (index, number of parts) of it.

        Each example is sampled by (seed, its visit). Missing ones are padding of weight 0.
        """
        part, pairs = process_slice(size, share), list(zip(indices, visits, strict=True))
        examples = [self._make(*pair, seed) for pair in pairs[part]]
        like, _ = examples[0] if examples else self._make(*pairs[0], seed)
        layout = self._layout
        return collate(
            [[row] for row, _ in examples],
            [label for _, label in examples],
            indices[part],
            batch=part.stop - part.start,
            length=layout.length(layout.max_len),
            pad_id=layout.pad_id,
            label_width=self._label_width,
            side=layout.side,
            shift=layout.shift,
            branches=layout.branches,
            decoder_length=self._decoder_length,
            decoder_shift=layout.decoder_shift,
            like=like,
        )

    def _make(self, index: int, visit: int, seed: int) -> tuple[Encoded, int]:
        return self._task(self._order[index], sample_rng(seed, visit))
