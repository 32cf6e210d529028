"""The parts that a row of tokens is made of: fixed runs, and texts that may be truncated."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from jaxprompt.data.text.encoded import Row, make_row
from jaxprompt.data.text.marking import truncate_around_entities, truncated_lengths
from jaxprompt.data.text.template import Part, modify
from jaxprompt.types import Role


class TokenRun(NamedTuple):
    """Consecutive tokens that share role and segment."""

    ids: list[int]
    role: Role
    segment: int
    slots: range | None = None
    text: str = ""
    cut: bool = False
    field: str = ""  # whose text it is
    side: int = -1  # where it stands among the entities of the field, see `truncate_around_entities`; -1 = it has none
    pending: bool = False  # its tokens are those of `text`, which `with_ids` gives it


class Gap(NamedTuple):
    """An example with one field left out."""

    before: list[TokenRun]
    field: TokenRun
    after: list[TokenRun]
    room: int  # tokens that the field may have


class TextPart(NamedTuple):
    """A part whose text comes from the example."""

    part: Part
    space: bool
    segment: int
    first: int = 0  # of the slots around its entities

    def run(self, text: str, cut: bool) -> TokenRun:
        """Makes the run of its text, with a leading space if its position needs one."""
        text = modify(text, self.part.modifiers)
        if self.space:
            text = text.lstrip()
            text = f" {text}" if text else ""
        return TokenRun([], Role.TEXT, self.segment, text=text, cut=cut, pending=True)


def cut_runs(runs: Sequence[TokenRun], room: int) -> tuple[list[TokenRun], bool]:
    """Truncates runs to `room` tokens; returns all runs, and whether any was truncated."""
    # What stands around entities counts as one text.
    number = lambda pair: pair[0] if pair[1].side < 0 else -1
    cuts = enumerate(run for run in runs if run.cut)
    texts = [[run for _, run in group] for _, group in groupby(cuts, number)]
    kept: list[tuple[int, int]] = []  # the first and the last tokens that each keeps
    lengths = [sum(len(run.ids) for run in text) for text in texts]
    for text, most in zip(texts, truncated_lengths(lengths, room), strict=True):
        sizes, sides = [len(run.ids) for run in text], [run.side for run in text]
        kept += [(most, 0)] if sides[0] < 0 else truncate_around_entities(sizes, sides, most)
    shares = iter(kept)
    short = [run._replace(ids=_ends(run.ids, *next(shares))) if run.cut else run for run in runs]
    return short, sum(map(sum, kept)) < sum(lengths)


def with_ids(runs: Sequence[TokenRun], tokens: Mapping[str, list[int]]) -> list[TokenRun]:
    """Fills in the tokens of the runs that are texts."""
    return [
        run._replace(ids=tokens[run.text], pending=False) if run.pending else run for run in runs
    ]


def join_runs(runs: Sequence[TokenRun]) -> Row:
    """Joins runs that have their tokens."""
    ids: list[int] = []
    slots: list[int] = []
    types: list[int] = []
    roles: list[int] = []
    for run in runs:
        count = len(run.ids)
        ids += run.ids
        slots += run.slots or [-1] * count
        types += [run.segment] * count
        roles += [int(run.role)] * count
    return make_row(ids, slots, types, roles, range(len(ids)))


def _ends(ids: list[int], first: int, last: int) -> list[int]:
    # Not ids[-last:], which for 0 would be all of them.
    return ids[:first] + ids[len(ids) - last :]
