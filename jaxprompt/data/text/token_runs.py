"""The parts that a row of tokens is made of: fixed runs, and texts that may be truncated."""

from collections.abc import Mapping, Sequence
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
    field: str = ""  # name of the field of the text
    side: int = -1  # position relative to the entities of its field (marking.py), -1 = it has none
    pending: bool = False  # whether `with_ids` still has to fill in the tokens of `text`


class Gap(NamedTuple):
    """An example with one field left out."""

    before: list[TokenRun]
    field: TokenRun
    after: list[TokenRun]
    room: int  # maximum number of tokens of the field


class TextPart(NamedTuple):
    """A part whose text comes from the example."""

    spec: Part
    space: bool
    segment: int
    first: int = 0  # of the slots around its entities

    def run(self, text: str, cut: bool) -> TokenRun:
        """Makes the run of its text, with a leading space if its position needs one."""
        text = modify(text, self.spec.modifiers)
        if self.space:
            text = text.lstrip()
            text = f" {text}" if text else ""
        return TokenRun([], Role.TEXT, self.segment, text=text, cut=cut, pending=True)


def cut_runs(runs: Sequence[TokenRun], room: int) -> tuple[list[TokenRun], int]:
    """Truncates runs to `room` tokens; returns all runs, and the number of tokens left out."""
    # The parts of a text around its entities share one limit.
    texts: list[list[TokenRun]] = []
    for run in runs:
        if run.cut and run.side >= 0 and texts and texts[-1][0].side >= 0:
            texts[-1].append(run)
        elif run.cut:
            texts.append([run])
    limits: list[tuple[int, int]] = []  # of each run, the number of first and of last tokens
    lengths = [sum(len(run.ids) for run in text) for text in texts]
    for text, limit in zip(texts, truncated_lengths(lengths, room), strict=True):
        sizes, sides = [len(run.ids) for run in text], [run.side for run in text]
        limits += [(limit, 0)] if sides[0] < 0 else truncate_around_entities(sizes, sides, limit)
    ends = iter(limits)
    truncated = [run._replace(ids=_ends(run.ids, *next(ends))) if run.cut else run for run in runs]
    return truncated, sum(lengths) - sum(map(sum, limits))


def with_ids(runs: Sequence[TokenRun], tokens: Mapping[str, list[int]]) -> list[TokenRun]:
    """Fills in the tokens of the runs that are texts."""
    return [
        run._replace(ids=tokens[run.text], pending=False) if run.pending else run for run in runs
    ]


def join_runs(runs: Sequence[TokenRun]) -> Row:
    """Joins runs to one row."""
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
