"""Batches of a pre-training task's examples, each from its number alone."""

from typing import Protocol

import numpy as np

from jaxprompt.corpus import Shuffle
from jaxprompt.corpus.denoise.batches import SampleSource
from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.corpus.ppt.forms import Forms
from jaxprompt.data.batches.batching import Layout
from jaxprompt.data.text.encoded import Encoded


class PptTask(Protocol):
    """A pre-training task with a number of examples."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def __call__(self, row: int, rng: np.random.RandomState) -> tuple[Encoded, int]:
        """Makes an example and its label, a pure function of the row and the random state."""


class PptSamples(SampleSource):
    """The examples of a task; every visit of an example samples it again."""

    def __init__(self, task: PptTask, forms: Forms, layout: Layout):
        """Takes a task and the layout of its rows."""
        self._task = task
        # Shuffled, so that EvalBatches, which takes the first rows, has many documents. The seed is
        # fixed, so that runs of any seed are evaluated on the same rows.
        self._order = Shuffle(len(task), 0)
        form = next(iter(forms.forms.values()))
        self._widths = dict(
            length=layout.length(layout.max_len),
            decoder_length=form.decoder_length,
            label_width=form.label_width,
            pad_id=layout.pad_id,
            side=layout.side,
            shift=layout.shift,
            branches=layout.branches,
            decoder_shift=layout.decoder_shift,
        )

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._task)

    def _make(self, index: int, visit: int, seed: int) -> tuple[Encoded, int]:
        return self._task(self._order[index], sample_rng(seed, visit))
