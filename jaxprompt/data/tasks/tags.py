"""Tags of words: the schemes IOB2, IOB1 and BIOES, read, checked and made IOB2.

An entity is words in a row of one type. In IOB2 its first word has B-TYPE and the others I-TYPE; in
IOB1 B-TYPE is only for the first word after another entity of that type; BIOES, also written
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


class Entity(NamedTuple):
    """Consecutive words that name one thing."""

    type: str
    start: int  # first word
    end: int  # after the last


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


def _split_tags(tags: Sequence[str], where: str) -> list[tuple[str, str]]:
    """Splits the tags of a text. Raises InputError for a tag that is invalid in every scheme."""
    try:
        return [split_tag(tag) for tag in tags]
    except ValueError as error:
        (tag,) = error.args
        raise InputError(
            f"{where}: word {tags.index(tag) + 1} has the invalid tag {tag!r}; tags are O, B-TYPE, "
            "I-TYPE, and E-TYPE or S-TYPE in BIOES; fix the row, or set task.scheme=none if each "
            "tag is for one word"
        ) from None


def find_scheme(rows: Iterable[Sequence[str]], where: Callable[[int], str]) -> str:
    """Detects the scheme of entity tags.

    Args:
      rows: the tags of each row.
      where: returns the place of a row, for messages.

    Raises:
      InputError: if a tag is invalid, or if some entities begin with B- and others with I-, which
        is neither IOB2 nor IOB1.
    """
    first_begins: dict[str, str] = {}  # letter -> the first row and word that begins so
    for number, tags in enumerate(rows):
        last_letter, last_kind = OUTSIDE, ""
        for word, (letter, kind) in enumerate(_split_tags(tags, where(number)), 1):
            # Only BIOES has these.
            if letter in ("E", "S"):
                return "bioes"
            # After an entity of the same type, B- and I- are valid in both schemes.
            if letter != OUTSIDE and (last_letter == OUTSIDE or kind != last_kind):
                first_begins.setdefault(letter, f"{where(number)}: word {word}")
            last_letter, last_kind = letter, kind
    if len(first_begins) == 2:
        raise InputError(
            f"{first_begins['I']} begins an entity with I-, but {first_begins['B']} with B-; IOB2 "
            "begins each with B-: fix the file, or set task.scheme=iob1 to read all of it as IOB1"
        )
    return "iob1" if "I" in first_begins else "iob2"


def find_entities(tags: Sequence[str], scheme: str) -> list[Entity]:
    """Finds the entities of a text.

    In IOB1 every tag is valid; in IOB2 an entity begins with B-; in BIOES it also ends with E-.

    Raises ValueError with the index of the first word whose tag is invalid.
    """
    entities: list[Entity] = []
    kind, start = "", 0  # of the open entity, "" = none
    # An O after the last word closes the open entity.
    for word, tag in enumerate([*tags, OUTSIDE]):
        letter, tag_kind = split_tag(tag)
        is_inside = letter in ("I", "E") and tag_kind == kind
        if scheme == "bioes":
            if not is_inside if kind else letter in ("I", "E"):
                raise ValueError(word)
        elif scheme == "iob2" and (letter in ("E", "S") or letter == "I" and not is_inside):
            raise ValueError(word)
        if not is_inside:
            if kind:
                entities.append(Entity(kind, start, word))
            kind, start = tag_kind, word
        if letter == "S" or (letter == "E" and is_inside):
            entities.append(Entity(kind, start, word + 1))
            kind = ""
    return entities


def write_iob2(entities: Iterable[Entity], words: int) -> list[str]:
    """Returns the IOB2 tags of `words` words for entities that do not overlap."""
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
    _split_tags(tags, where)
    try:
        return write_iob2(find_entities(tags, scheme), len(tags))
    except ValueError as error:
        (at,) = error.args
        tag = tags[at] if at < len(tags) else "the end"
        before = tags[at - 1] if at else "the beginning"
        raise InputError(
            f"{where}: word {at + 1} has {tag!r} after {before!r}, which task.scheme={scheme} "
            f"does not allow ({_RULES[scheme]}); fix the row, or set another scheme"
        ) from None


def iob2_labels(types: Iterable[str]) -> tuple[str, ...]:
    """Returns the IOB2 tags of entity types: O, then B- and I- of each type, sorted."""
    pairs = ((f"B-{kind}", f"I-{kind}") for kind in sorted(set(types)))
    return (OUTSIDE, *(tag for pair in pairs for tag in pair))


def lenient_entities(tags: Sequence[str]) -> list[Entity]:
    """Finds the entities of predicted IOB2 tags; I- may also begin one, as in conlleval."""
    return find_entities(tags, "iob1")
