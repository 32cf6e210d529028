"""Tokens that share a role, of which an input is made, and how texts are cut to what fits."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxprompt.types import Role


class Run(NamedTuple):
    """Tokens in a row that share role and segment; `text` is tokenised where `ids` is None."""

    ids: list[int] | None
    role: Role
    segment: int
    slots: range | None = None
    text: str = ""
    cut: bool = False
    field: str = ""  # whose text it is


def kept_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Lengths left when the longest loses a token, ties the later one, until they fit `room`."""
    kept = list(lengths)
    if sum(kept) <= room:
        return kept
    level = 0
    left = room
    for rank, length in enumerate(sorted(lengths)):
        level = min(length, left // (len(lengths) - rank))
        if level < length:
            break
        left -= length
    kept = [min(length, level) for length in lengths]
    spare = room - sum(kept)
    for i, length in enumerate(lengths):
        if spare and length > level:
            kept[i] += 1
            spare -= 1
    return kept
