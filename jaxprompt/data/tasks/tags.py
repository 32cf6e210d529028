"""Tags of words: the schemes IOB2, IOB1 and BIOES, read, checked and made IOB2.

An entity is words in a row of one type. In IOB2 its first word has B-TYPE and the others I-TYPE; in
IOB1 B-TYPE is only for the first word behind another entity of that type; BIOES, also written
BILOU, has E- (L-) for the last word and S- (U-) for an entity of one word. O is outside of all.
Tags without a scheme, as parts of speech, are of single words and stay as they are.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxprompt.errors import InputError

NO_SCHEME = "none"
SCHEMES = ("iob2", "iob1", "bioes", NO_SCHEME)
OUTSIDE = "O"
_LETTERS = {"L": "E", "U": "S"}  # BILOU -> BIOES


_RULES = {
    "iob2": "I-X may only follow B-X or I-X",
    "bioes": "B-X and I-X must be followed by I-X or E-X, which may follow nothing else",
}


class IllegalTag(InputError):
    """A tag that its scheme does not allow at its position."""


class Entity(NamedTuple):
    """Consecutive words that name one thing."""

    type: str
    start: int  # first word
    end: int  # behind the last


def split_tag(tag: str) -> tuple[str, str]:
    """Splits "B-PER" into its letter and its type, "O" into itself and "".

    Raises ValueError if it is not a tag of any scheme.
    """
    if tag == OUTSIDE:
        return OUTSIDE, ""
    letter, dash, kind = tag.partition("-")
    letter = _LETTERS.get(letter, letter)
    if not dash or not kind or letter not in "BIES" or len(letter) != 1:
        raise ValueError(tag)
    return letter, kind


def find_scheme(rows: Iterable[Sequence[str]], where: Callable[[int], str]) -> str:
    """Detects the scheme of entity tags.

    Args:
      rows: the tags of each row.
      where: returns the place of a row, for messages.

    Raises:
      InputError: if a tag is invalid, or if some entities begin with B- and others with I-, which
        is
        neither IOB2 nor IOB1.
    """
    begun: dict[str, tuple[int, int]] = {}  # B or I -> the first place where an entity begins so
    count, odd = 0, set()  # rows, and those in which an entity begins with I-
    for number, tags in enumerate(rows):
        count = number + 1
        letter, kind = OUTSIDE, ""
        for word, tag in enumerate(tags):
            old, old_kind = letter, kind
            try:
                letter, kind = split_tag(tag)
            except ValueError:
                raise InputError(
                    f"{where(number)}: word {word + 1} has the tag {tag!r}; tags are O, B-TYPE, "
                    "I-TYPE, and E-TYPE or S-TYPE in BIOES; fix the row, or set task.scheme=none "
                    "if each tag is for one word"
                ) from None
            # No other scheme has these, so the first of them decides.
            if letter in ("E", "S"):
                return "bioes"
            # Behind an entity of its own type, B- and I- are right in both schemes.
            if letter != OUTSIDE and (old == OUTSIDE or kind != old_kind):
                begun.setdefault(letter, (number, word))
                odd |= {number} if letter == "I" else set()
    if len(begun) == 2:
        number, word = begun["I"]
        other, _ = begun["B"]
        raise InputError(
            f"{where(number)}: word {word + 1} begins an entity with I-, but one at {where(other)} "
            f"begins with B-; {len(odd)} of {count} rows begin an entity with I-; IOB2 begins each "
            "with B-: fix the file, or set task.scheme=iob1 to read all of it as IOB1"
        )
    return "iob1" if "I" in begun else "iob2"


def find_entities(tags: Sequence[str], scheme: str) -> list[Entity]:
    """Finds the entities of a text.

    In IOB1 every tag is valid; in IOB2 an entity begins with B-; in BIOES it also ends with E-.

    Raises ValueError with the index of the first word whose tag is invalid.
    """
    found: list[Entity] = []
    kind, start = "", 0  # of the entity that is open, "" = none
    # An O behind all closes the entity that is open.
    for word, tag in enumerate([*tags, OUTSIDE]):
        letter, own = split_tag(tag)
        goes_on = letter in ("I", "E") and own == kind
        if scheme == "bioes":
            if not goes_on if kind else letter in ("I", "E"):
                raise ValueError(word)
        elif scheme == "iob2" and (letter in ("E", "S") or letter == "I" and not goes_on):
            raise ValueError(word)
        if goes_on and letter == "I":
            continue
        if goes_on:  # E-
            found.append(Entity(kind, start, word + 1))
            kind = ""
            continue
        if kind:
            found.append(Entity(kind, start, word))
        if letter == "S":
            found.append(Entity(own, word, word + 1))
            kind = ""
        else:
            kind, start = (own, word) if letter != OUTSIDE else ("", 0)
    return found


def write_iob2(entities: Iterable[Entity], words: int) -> list[str]:
    """Returns the IOB2 tags of so many words for entities that do not overlap."""
    tags = [OUTSIDE] * words
    for kind, start, end in entities:
        tags[start:end] = [f"B-{kind}"] + [f"I-{kind}"] * (end - start - 1)
    return tags


def to_iob2(tags: Sequence[str], scheme: str, where: str) -> list[str]:
    """Converts the tags of a text to IOB2; tags without a scheme stay as they are.

    Raises InputError for a tag that the scheme does not allow.
    """
    if scheme == NO_SCHEME:
        return list(tags)
    try:
        return write_iob2(find_entities(tags, scheme), len(tags))
    except ValueError as error:
        (at,) = error.args
        if isinstance(at, str):
            raise InputError(
                f"{where}: word {tags.index(at) + 1} has the invalid tag {at!r}; tags are e.g. O, "
                "B-PER, I-PER; fix the row"
            ) from None
        tag = tags[at] if at < len(tags) else "the end"
        before = tags[at - 1] if at else "the beginning"
        raise IllegalTag(
            f"{where}: word {at + 1} has {tag!r} after {before!r}, which task.scheme={scheme} "
            f"does not allow ({_RULES[scheme]}); fix the row, or set another scheme"
        ) from None


def iob2_labels(types: Iterable[str]) -> tuple[str, ...]:
    """Lists the IOB2 tags of some entity types: O first, then B- and I- of each, sorted by type."""
    pairs = ((f"B-{kind}", f"I-{kind}") for kind in sorted(set(types)))
    return (OUTSIDE, *(tag for pair in pairs for tag in pair))


def lenient_entities(tags: Sequence[str]) -> list[Entity]:
    """Finds the entities of predicted IOB2 tags; I- may also begin one, as in conlleval."""
    return find_entities(tags, "iob1")
