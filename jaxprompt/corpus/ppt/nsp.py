"""Next-sentence prediction in three classes, which pre-trains for pairs (PPT, section 3.2.1).

Two units are neighbours in either order, or from the same document, or from two documents.
"""

from functools import partial

import numpy as np

from jaxprompt.corpus import Corpus
from jaxprompt.corpus.ppt.forms import Form, Forms
from jaxprompt.corpus.ppt.units import Query, RandomInts, Units, UnitTask, first_example
from jaxprompt.data.text.encoded import Encoded, Ints

OTHER, SAME, NEIGHBOUR = range(3)  # the labels

_MIN_TOKENS, _MIN_UNITS = 5, 5  # tokens of a unit, units of a document
_MAX_RATIO = 100  # of the lengths of a pair


class NextSentence(UnitTask):
    """Examples by row, the first unit of a pair; labels are random, a third each."""

    majority = 1 / 3

    def __init__(self, units: Units, form: Form):
        """Raises InputError if there is no second document."""
        units.check_documents(2, "nsp")
        self.units, self._form = units, form

    def __call__(self, row: int, rng: np.random.RandomState) -> tuple[Encoded, int]:
        """Makes an example and its label, a pure function of the row and the random state."""
        random = RandomInts(rng)
        # Once per example, not per row tried, so that skipped rows do not change the shares.
        label = random.below(3)
        sample = partial(self._sample, label=label, random=random)
        return self._form.fill(first_example(sample, row, len(self))), label

    def _sample(
        self, unit: int, matched: bool, *, label: int, random: RandomInts
    ) -> dict[str, np.ndarray] | None:
        max_tokens = self._form.max_text_tokens
        query = Query(self.units, unit, random, max_tokens=max_tokens, matched=matched)
        # Units of all kinds, so that success does not depend on the label.
        same, other = query.same(1), query.other(1)
        if same is None or other is None:
            return None
        seconds = {OTHER: other[0], SAME: same[0], NEIGHBOUR: query.neighbour}
        lengths = [len(self.units.ids(one)) for one in (unit, *seconds.values())]
        if max(lengths) > _MAX_RATIO * min(lengths):
            return None
        texts = query.texts(list(seconds.values()))
        if texts is None:
            return None
        return {"first": self.units.ids(unit), "second": texts[list(seconds).index(label)]}


def make(corpus: Corpus, documents: Ints, forms: Forms, *, matched: bool = True) -> NextSentence:
    """Makes the task from some documents of a corpus; see Units for `matched`."""
    form = forms.forms[0]
    units = Units(
        corpus,
        documents,
        min_tokens=_MIN_TOKENS,
        min_units=_MIN_UNITS,
        max_length=form.max_text_tokens,
        matched=matched,
    )
    return NextSentence(units, form)
