"""Marks entities in a text, and truncates the text without losing one."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

MARKERS = "@#$%"  # around the first entity, the second, ...: words that every vocabulary has


class MarkedPiece(NamedTuple):
    """A part of a text whose entities are marked."""

    text: str
    kind: str  # context | entity | marker
    number: int = 0  # of an entity i; 2i opens it, 2i + 1 closes it; of a context: see `truncate_around_entities`


def default_markers(entities: int) -> tuple[str, ...]:
    """Returns the words around so many entities: the same word opens and closes one."""
    return tuple(MARKERS[i // 2 % len(MARKERS)] for i in range(2 * entities))


def mark_entities(
    text: str, spans: Sequence[tuple[int, int]], *, words: Sequence[str] = (), space: bool
) -> Iterator[MarkedPiece]:
    """Divides a text at its entities and puts a marker before and after each.

    White space before an entity comes after its marker, so that a byte-level BPE sees the entity as
    in a sentence. Markers are `words`, each after a space, or have no text. `space` says whether
    the text itself follows white space. An entity at (-1, -1) is not marked.
    """
    at, side = 0, _FIRST
    for i in sorted((i for i in range(len(spans)) if spans[i][0] >= 0), key=lambda i: spans[i]):
        before = text[at : spans[i][0]]
        held = before.rstrip()
        spaced = held != before or (side == _FIRST and space and not held)
        if side == _FIRST and space and held:
            held = f" {held.lstrip()}"
        yield MarkedPiece(held, "context", side)
        front = " " * (spaced or bool(at))
        yield MarkedPiece(front + words[2 * i] if words else "", "marker", 2 * i)
        yield MarkedPiece(" " * (spaced or bool(words)) + text[slice(*spans[i])], "entity", i)
        yield MarkedPiece(f" {words[2 * i + 1]}" if words else "", "marker", 2 * i + 1)
        at, side = spans[i][1], _BETWEEN
    rest = text[at:]
    if side == _FIRST and space:
        rest = f" {rest.lstrip()}" if rest.strip() else ""
    yield MarkedPiece(rest, "context", _LAST)


# -- what does not fit ----------------------------------------------------------------------------

_FIRST, _BETWEEN, _LAST = range(3)  # a context: before all entities, between two, behind all


def truncated_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Returns lengths that fit `room`: the longest (last of equal ones) loses tokens first."""
    kept = list(lengths)
    if sum(kept) <= room:
        return kept
    level = 0
    left = room
    # The shortest first: what it leaves unused raises the level of the longer ones.
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


def truncate_around_entities(
    lengths: Sequence[int], sides: Sequence[int], room: int
) -> list[tuple[int, int]]:
    """Truncates the text around entities to `room` tokens.

    The text before the first entity loses its beginning and that after the last its end, the longer
    one first. Only when these are used up, texts between entities lose their middle.

    Returns:
      The number of first and last tokens that each text keeps.
    """
    inner = [own * (side == _BETWEEN) for own, side in zip(lengths, sides, strict=True)]
    outer = [own - mid for own, mid in zip(lengths, inner, strict=True)]
    # Texts between entities come first: what they need is taken off the outer ones.
    inner = truncated_lengths(inner, room)
    outer = truncated_lengths(outer, room - sum(inner))
    found = []
    for out, mid, side in zip(outer, inner, sides, strict=True):
        shares = {_FIRST: (0, out), _BETWEEN: (mid - mid // 2, mid // 2), _LAST: (out, 0)}
        found.append(shares[side])
    return found
