"""What a row of tokens is put together from: runs that are fixed, and texts that may be cut."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from jaxprompt.data.marking import fit, kept_lengths
from jaxprompt.data.template import Part, modify
from jaxprompt.types import Role


class TokenRun(NamedTuple):
    """Tokens in a row that share role and segment; `text` is tokenised where `ids` is None."""

    ids: list[int] | None
    role: Role
    segment: int
    slots: range | None = None
    text: str = ""
    cut: bool = False
    field: str = ""  # whose text it is
    side: int = -1  # where it stands among the entities of the field, see `fit`; -1 = it has none


class Gap(NamedTuple):
    """An example with a field left open."""

    before: list[TokenRun]
    field: TokenRun
    after: list[TokenRun]
    room: int  # tokens that the field may have


class OpenPart(NamedTuple):
    """A part whose text comes with the example."""

    part: Part
    space: bool
    segment: int
    first: int = 0  # of the slots around its entities


def cut_runs(runs: Sequence[TokenRun], room: int) -> list[tuple[int, int]]:
    """Cuts the runs that may be to `room` tokens. -> the first and the last tokens each keeps"""
    # What stands around entities counts as one text.
    number = lambda pair: pair[0] if pair[1].side < 0 else -1
    cuts = enumerate(run for run in runs if run.cut)
    texts = [[run for _, run in group] for _, group in groupby(cuts, number)]
    found: list[tuple[int, int]] = []
    lengths = [sum(len(run.ids) for run in text) for text in texts]
    for text, kept in zip(texts, kept_lengths(lengths, room), strict=True):
        sizes, sides = [len(run.ids) for run in text], [run.side for run in text]
        found += [(kept, 0)] if sides[0] < 0 else fit(sizes, sides, kept)
    return found


def text_run(text: str, item: OpenPart, cut: bool) -> TokenRun:
    """Makes the run of a field's text, with the space in front that its place asks for."""
    text = modify(text, item.part.modifiers)
    if item.space:
        text = text.lstrip()
        text = f" {text}" if text else ""
    return TokenRun(None, Role.TEXT, item.segment, text=text, cut=cut)
