"""Classification of single units by pseudo-labels (PPT, section 3.2.3)."""

import zlib
from collections.abc import Sequence

import numpy as np

from jaxprompt.corpus import Corpus
from jaxprompt.corpus.ppt.annotations import PUBLISHED_THRESHOLDS, Annotations
from jaxprompt.corpus.ppt.forms import Form, Forms
from jaxprompt.data.text.encoded import Encoded, Ints
from jaxprompt.errors import InputError


class Classification:
    """Examples by row; a row is a unit, and nothing is random."""

    def __init__(
        self,
        corpus: Corpus,
        units: np.ndarray,
        labels: np.ndarray,
        form: Form,
        classes: int,
        num_units: int,
    ):
        """Takes the numbers of one or more of `num_units` units, and their labels."""
        self._num_units = num_units
        self._corpus, self._units, self._labels, self._form = corpus, units, labels, form
        self.counts = np.bincount(labels, minlength=classes)  # [C] units of each class
        # The baseline of the held-out accuracy.
        self.majority = float(self.counts.max() / len(labels))
        # Identifies the units and their labels.
        self.digest = zlib.crc32(labels.data, zlib.crc32(units.data))

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._units)

    def summary(self) -> str:
        """Returns a message with what is used and what is excluded."""
        return (
            f"{len(self):,} units, by class {', '.join(map(str, self.counts))}; excluded: "
            f"{self._num_units - len(self):,} units with no label above its threshold"
        )

    def __call__(self, row: int, rng: np.random.RandomState) -> tuple[Encoded, int]:
        """Makes an example and its label."""
        del rng
        text = self._corpus.unit(int(self._units[row]))
        return self._form.fill({"text": text}), int(self._labels[row])


def make(
    corpus: Corpus,
    documents: Ints,
    forms: Forms,
    annotations: Annotations,
    thresholds: Sequence[float] = PUBLISHED_THRESHOLDS,
) -> Classification:
    """Makes the task from units of some documents whose label is above its threshold."""
    classes = len(forms.verbalizer.words)
    annotations.check(corpus, classes)
    labels = annotations.labels(thresholds)
    labelled, num_units = [np.zeros(0, np.int64)], 0
    for document in documents:
        span = corpus.units(document)
        num_units += len(span)
        labelled.append(span.start + np.flatnonzero(labels[span.start : span.stop] >= 0))
    units = np.concatenate(labelled)
    if not len(units):
        raise InputError(
            f"none of {num_units} units has a label above its threshold "
            f"({', '.join(map(str, thresholds))}); lower ppt.thresholds, or add text"
        )
    return Classification(corpus, units, labels[units], forms.forms[0], classes, num_units)
