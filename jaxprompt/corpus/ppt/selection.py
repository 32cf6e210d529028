"""Next-sentence selection, which pre-trains for multiple choice (PPT, sections 3.2.2 and 3.3).

One of the options is a neighbour of the query; others are from its document or other documents. nss
has six options, the unified task 2 to 16, whose lengths and shares are the released code's.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxprompt.corpus import Corpus
from jaxprompt.corpus.ppt.forms import Form, Forms
from jaxprompt.corpus.ppt.units import Query, RandomInts, Units, UnitTask, first_example
from jaxprompt.data.text.encoded import Encoded, Ints
from jaxprompt.errors import InputError


class Composition(NamedTuple):
    """Where a number of options come from, and their lengths."""

    query: int  # maximum tokens
    option: int  # maximum tokens
    same: int  # options of the same document, besides the neighbour
    others: tuple[int, ...]  # options of each other document


NSS = {6: Composition(389, 86, 1, (1, 1, 1, 1))}
UNIFIED = {
    2: Composition(400, 50, 1, ()),
    3: Composition(400, 50, 1, (1,)),
    4: Composition(400, 50, 1, (1, 1)),
    5: Composition(400, 40, 1, (1, 1, 1)),
    6: Composition(300, 40, 1, (1, 1, 1, 1)),
    7: Composition(250, 30, 2, (1, 1, 1, 1)),
    8: Composition(200, 30, 2, (2, 1, 1, 1)),
    9: Composition(200, 30, 2, (2, 2, 1, 1)),
    10: Composition(150, 20, 2, (2, 2, 2, 1)),
    11: Composition(150, 20, 3, (2, 2, 2, 1)),
    12: Composition(150, 20, 3, (2, 2, 2, 2)),
    13: Composition(150, 20, 3, (3, 2, 2, 2)),
    14: Composition(150, 20, 3, (3, 3, 2, 2)),
    15: Composition(150, 20, 3, (3, 3, 3, 2)),
    16: Composition(150, 20, 3, (3, 3, 3, 3)),
}
_MIN_TOKENS = 5  # of a unit
_MIN_UNITS = {"nss": 5, "unified": 6}  # of a document


class Selection(UnitTask):
    """Examples by row, the query; the number of options is uniformly random."""

    def __init__(
        self,
        name: str,
        units: Units,
        forms: Mapping[int, Form],
        compositions: Mapping[int, Composition],
    ):
        """Raises InputError if there are too few documents for the options."""
        # The query's own document, and one for each entry of `others`.
        units.check_documents(1 + max(len(x.others) for x in compositions.values()), name)
        self.units, self._forms = units, forms
        self._counts = tuple(sorted(compositions))
        # Options are compared as truncated for the form, which has space for equal lengths.
        self._compositions = {
            n: composition._replace(
                option=min(composition.option, forms[n].max_text_tokens // (n + 1))
            )
            for n, composition in compositions.items()
        }
        # Each number n of options is equally likely, and a random guess is right in 1 / n of cases.
        self.majority = sum(1 / n for n in compositions) / len(compositions)

    def __call__(self, row: int, rng: np.random.RandomState) -> tuple[Encoded, int]:
        """Makes an example and its label, a pure function of the row and the random state."""
        random = RandomInts(rng)
        # Once per example, not per row tried, so that counts that are hard to fill stay as likely.
        count = self._counts[random.below(len(self._counts))]
        composition = self._compositions[count]
        sample = partial(self._sample, composition=composition, random=random)
        query, options = first_example(sample, row, len(self))
        order = list(range(count))
        # A Fisher-Yates shuffle; option 0 is the neighbour.
        for last in range(count - 1, 0, -1):
            other = random.below(last + 1)
            order[last], order[other] = order[other], order[last]
        texts = {f"option{place}": options[i] for place, i in enumerate(order)}
        return self._forms[count].fill({"query": query} | texts), order.index(0)

    def _sample(
        self, unit: int, matched: bool, *, composition: Composition, random: RandomInts
    ) -> tuple[np.ndarray, list[np.ndarray]] | None:
        """Samples options. Returns the texts of the query and of the options, neighbour first."""
        query = Query(self.units, unit, random, max_tokens=composition.option, matched=matched)
        options = [query.neighbour]
        for units in (query.same(composition.same), *map(query.other, composition.others)):
            if units is None:
                return None
            options += units
        texts = query.texts(options)
        return None if texts is None else (self.units.ids(unit)[: composition.query], texts)


def option_counts(task: str, min_options: int = 2, max_options: int = 16) -> tuple[int, ...]:
    """Lists the numbers of options that a task samples from, for its forms."""
    if task == "nss":
        return tuple(NSS)
    if not min(UNIFIED) <= min_options <= max_options <= max(UNIFIED):
        raise InputError(
            f"{min_options} to {max_options} options are not valid: the unified task has 2 to 16; "
            "set both limits within that range, the lower first"
        )
    return tuple(range(min_options, max_options + 1))


def make(
    task: str, corpus: Corpus, documents: Ints, forms: Forms, *, matched: bool = True
) -> Selection:
    """Makes nss or the unified task from some documents of a corpus; see Units for `matched`."""
    table = NSS if task == "nss" else UNIFIED
    compositions = {count: table[count] for count in forms.forms}
    units = Units(
        corpus,
        documents,
        min_tokens=_MIN_TOKENS,
        min_units=_MIN_UNITS[task],
        max_length=max(composition.option for composition in compositions.values()),
        matched=matched,
    )
    return Selection(task, units, forms.forms, compositions)
