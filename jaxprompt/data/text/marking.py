"""Marks entities in a text, and truncates the text without losing one."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

MARKERS = "@#$%"  # around the first entity, the second, ...: words that every vocabulary has


class MarkedPiece(NamedTuple):
    """A part of a text whose entities are marked."""

    text: str
    kind: str  # context | entity | marker
    number: int = 0  # entity i; markers 2i before and 2i + 1 after it; context: _FIRST to _LAST


def default_markers(entities: int) -> tuple[str, ...]:
    """Returns the words around each entity: the same word before and after it."""
    return tuple(MARKERS[i // 2 % len(MARKERS)] for i in range(2 * entities))


def mark_entities(
    text: str, spans: Sequence[tuple[int, int]], *, words: Sequence[str] = (), space: bool
) -> Iterator[MarkedPiece]:
    """Divides a text at its entities and puts a marker before and after each.

    White space before an entity comes after its marker, so that a byte-level BPE sees the entity as
    in a sentence. Markers are `words`, each after a space, or have no text. `space` says whether
    the text itself follows white space. An entity at (-1, -1) is not marked.
    """
    end, side = 0, _FIRST
    for i in sorted((i for i in range(len(spans)) if spans[i][0] >= 0), key=lambda i: spans[i]):
        before = text[end : spans[i][0]]
        context = before.rstrip()
        has_space = context != before or (side == _FIRST and space and not context)
        if side == _FIRST and space and context:
            context = f" {context.lstrip()}"
        yield MarkedPiece(context, "context", side)
        space_before = " " if has_space or end else ""
        yield MarkedPiece(space_before + words[2 * i] if words else "", "marker", 2 * i)
        entity = text[slice(*spans[i])]
        yield MarkedPiece(f" {entity}" if has_space or words else entity, "entity", i)
        yield MarkedPiece(f" {words[2 * i + 1]}" if words else "", "marker", 2 * i + 1)
        end, side = spans[i][1], _BETWEEN
    rest = text[end:]
    if side == _FIRST and space:
        rest = f" {rest.lstrip()}" if rest.strip() else ""
    yield MarkedPiece(rest, "context", _LAST)


# -- what does not fit ----------------------------------------------------------------------------

_FIRST, _BETWEEN, _LAST = range(3)  # context before all entities, between two, after all


def truncated_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Returns lengths that fit `room`: the longest (last of equal ones) loses tokens first."""
    limits = list(lengths)
    if sum(limits) <= room:
        return limits
    level = 0
    room_left = room
    # The shortest first: what it leaves unused raises the level of the longer ones.
    for rank, length in enumerate(sorted(lengths)):
        level = min(length, room_left // (len(lengths) - rank))
        if level < length:
            break
        room_left -= length
    limits = [min(length, level) for length in lengths]
    spare = room - sum(limits)
    for i, length in enumerate(lengths):
        if spare and length > level:
            limits[i] += 1
            spare -= 1
    return limits


def truncate_around_entities(
    lengths: Sequence[int], sides: Sequence[int], room: int
) -> list[tuple[int, int]]:
    """Truncates the text around entities to `room` tokens.

    The text before the first entity loses its beginning and that after the last its end, the longer
    one first. Only when these are used up, texts between entities lose their middle.

    Returns:
      The number of first and last tokens that each text keeps.
    """
    inner = [length * (side == _BETWEEN) for length, side in zip(lengths, sides, strict=True)]
    outer = [length * (side != _BETWEEN) for length, side in zip(lengths, sides, strict=True)]
    # Texts between entities have priority.
    inner = truncated_lengths(inner, room)
    outer = truncated_lengths(outer, room - sum(inner))
    ends = []
    for size, side in zip(map(sum, zip(inner, outer, strict=True)), sides, strict=True):
        ends.append(
            {_FIRST: (0, size), _BETWEEN: (size - size // 2, size // 2), _LAST: (size, 0)}[side]
        )
    return ends
