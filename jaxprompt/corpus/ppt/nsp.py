"""Next-sentence prediction in three classes, which pre-trains for pairs (PPT, section 3.2.1).

Two units are neighbours in either order, or from the same document, or from two documents.
"""

from collections.abc import Sequence

import numpy as np

from jaxprompt.corpus import Corpus
from jaxprompt.corpus.ppt.forms import Form, Forms
from jaxprompt.corpus.ppt.units import Draws, OfUnits, Query, Units, first_found
from jaxprompt.data.text.encoded import Encoded

OTHER, SAME, NEIGHBOUR = range(3)  # the labels

_LEAST, _COUNT = 5, 5  # tokens of a unit, units of a document
_RATIO = 100  # of the lengths of a pair, at most


class NextSentence(OfUnits):
    """Examples by row, the first unit of a pair; labels are random, a third each."""

    majority = 1 / 3

    def __init__(self, units: Units, form: Form):
        """Raises InputError if there is no second document."""
        units.need(2, "nsp")
        self.units, self._form = units, form

    def __call__(self, row: int, rng: np.random.RandomState) -> tuple[Encoded, int]:
        """Makes an example and its label, a pure function of the row and the random state."""
        draws = Draws(rng)
        # Once per example, not per row tried: rows passed over must not shift the shares.
        label = draws.below(3)
        draw = lambda at, alike: self._draw(at, label, draws, alike)
        return self._form.fill(first_found(draw, row, len(self))), label

    def _draw(self, at: int, label: int, draws: Draws, alike: bool) -> dict[str, np.ndarray] | None:
        query = Query(self.units, at, draws, cut=self._form.room, alike=alike)
        # All are drawn for any label: what can be found must not depend on it.
        same, other = query.same(1), query.other(1)
        if same is None or other is None:
            return None
        seconds = {OTHER: other[0], SAME: same[0], NEIGHBOUR: query.neighbour}
        lengths = [len(self.units.ids(unit)) for unit in (at, *seconds.values())]
        if max(lengths) > _RATIO * min(lengths):
            return None
        texts = query.shown(list(seconds.values()))
        if texts is None:
            return None
        return {"first": self.units.ids(at), "second": texts[list(seconds).index(label)]}


def make(
    corpus: Corpus, documents: Sequence[int], forms: Forms, *, matched: bool = True
) -> NextSentence:
    """Makes the task from some documents of a corpus; see Units for `matched`."""
    form = forms.forms[0]
    units = Units(
        corpus, documents, least=_LEAST, count=_COUNT, cap=form.room, matched=matched
    )  # fmt: skip
    return NextSentence(units, form)
