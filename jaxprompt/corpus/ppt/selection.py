"""Next-sentence selection, which pre-trains for multiple choice (PPT, sections 3.2.2 and 3.3).

One of the options is a neighbour of the query; others are from its document or other documents. nss
has six options, the unified task 2 to 16, whose lengths and shares are the released code's.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxprompt.corpus import Corpus
from jaxprompt.corpus.ppt.forms import Form, Forms
from jaxprompt.corpus.ppt.units import Draws, OfUnits, Query, Units, first_found
from jaxprompt.data.text.encoded import Encoded
from jaxprompt.errors import InputError


class Shares(NamedTuple):
    """The composition of a number of options."""

    query: int  # tokens, at most
    option: int  # tokens, at most
    same: int  # options of the same document, beside the neighbour
    others: tuple[int, ...]  # options of each other document


NSS = {6: Shares(389, 86, 1, (1, 1, 1, 1))}
UNIFIED = {
    2: Shares(400, 50, 1, ()),
    3: Shares(400, 50, 1, (1,)),
    4: Shares(400, 50, 1, (1, 1)),
    5: Shares(400, 40, 1, (1, 1, 1)),
    6: Shares(300, 40, 1, (1, 1, 1, 1)),
    7: Shares(250, 30, 2, (1, 1, 1, 1)),
    8: Shares(200, 30, 2, (2, 1, 1, 1)),
    9: Shares(200, 30, 2, (2, 2, 1, 1)),
    10: Shares(150, 20, 2, (2, 2, 2, 1)),
    11: Shares(150, 20, 3, (2, 2, 2, 1)),
    12: Shares(150, 20, 3, (2, 2, 2, 2)),
    13: Shares(150, 20, 3, (3, 2, 2, 2)),
    14: Shares(150, 20, 3, (3, 3, 2, 2)),
    15: Shares(150, 20, 3, (3, 3, 3, 2)),
    16: Shares(150, 20, 3, (3, 3, 3, 3)),
}
_LEAST = 5  # tokens of a unit
_COUNT = {"nss": 5, "unified": 6}  # units of a document


class Selection(OfUnits):
    """Examples by row, the query; the number of options is uniformly random."""

    def __init__(
        self, name: str, units: Units, forms: Mapping[int, Form], shares: Mapping[int, Shares]
    ):
        """Raises InputError if there are too few documents for the options."""
        # The query's own document, and one for each entry of `others`.
        units.need(1 + max(len(own.others) for own in shares.values()), name)
        self.units, self._forms = units, forms
        self._numbers = tuple(sorted(shares))
        # Options are compared as they will be shown: a form has room for as much of each.
        self._shares = {
            number: own._replace(option=min(own.option, forms[number].room // (number + 1)))
            for number, own in shares.items()
        }
        # Any number n of options is equally likely, and a blind guess is right in 1 / n of cases.
        self.majority = sum(1 / number for number in shares) / len(shares)

    def __call__(self, row: int, rng: np.random.RandomState) -> tuple[Encoded, int]:
        """Makes an example and its label, a pure function of the row and the random state."""
        draws = Draws(rng)
        # Before any row is tried: a number that is hard to fill must not become rare.
        number = self._numbers[draws.below(len(self._numbers))]
        own = self._shares[number]
        draw = lambda at, alike: self._draw(at, own, draws, alike)
        query, options = first_found(draw, row, len(self))
        order = list(range(number))
        # A Fisher-Yates shuffle by the example's own numbers; option 0 is the neighbour.
        for last in range(number - 1, 0, -1):
            other = draws.below(last + 1)
            order[last], order[other] = order[other], order[last]
        texts = {"query": query}
        for place, i in enumerate(order):
            texts[f"option{place}"] = options[i]
        return self._forms[number].fill(texts), order.index(0)

    def _draw(
        self, at: int, own: Shares, draws: Draws, alike: bool
    ) -> tuple[np.ndarray, list[np.ndarray]] | None:
        """Draws the options, the neighbour first. -> texts of the query, of the options"""
        query = Query(self.units, at, draws, cut=own.option, alike=alike)
        options = [query.neighbour]
        for found in (query.same(own.same), *map(query.other, own.others)):
            if found is None:
                return None
            options += found
        texts = query.shown(options)
        return None if texts is None else (self.units.ids(at)[: own.query], texts)


def numbers_of_options(task: str, least: int = 2, most: int = 16) -> tuple[int, ...]:
    """Lists the numbers of options that a task samples from, for its forms."""
    if task == "nss":
        return tuple(NSS)
    if not min(UNIFIED) <= least <= most <= max(UNIFIED):
        raise InputError(
            f"{least} to {most} options are not valid: the unified task has 2 to 16; set both "
            "limits within that range, the lower first"
        )
    return tuple(range(least, most + 1))


def make(
    task: str, corpus: Corpus, documents: Sequence[int], forms: Forms, *, matched: bool = True
) -> Selection:
    """Makes nss or the unified task from some documents of a corpus; see Units for `matched`."""
    table = NSS if task == "nss" else UNIFIED
    if odd := sorted(forms.forms.keys() - table.keys()):
        known = ", ".join(map(str, table))
        raise InputError(f"{odd[0]} options are not valid: {task} has {known}; use these numbers")
    shares = {number: table[number] for number in forms.forms}
    # No option is shown longer, so lengths beyond need not be told apart.
    cap = max(own.option for own in shares.values())
    units = Units(
        corpus, documents, least=_LEAST, count=_COUNT[task], cap=cap, matched=matched
    )  # fmt: skip
    return Selection(task, units, forms.forms, shares)
