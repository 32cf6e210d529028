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
    "iob2": "I-X goes on behind B-X or I-X alone",
    "bioes": "B-X and I-X go on with I-X or E-X, and nothing else does",
}


class IllegalTag(InputError):
    """A tag that its scheme does not have where it stands."""


class Entity(NamedTuple):
    """Words in a row that name one thing."""

    type: str
    start: int  # first word
    end: int  # behind the last


def split_tag(tag: str) -> tuple[str, str]:
    """Splits "B-PER" into its letter and its type, "O" into itself and "".

    Raises ValueError for what is no tag of any scheme.
    """
    if tag == OUTSIDE:
        return OUTSIDE, ""
    letter, dash, kind = tag.partition("-")
    letter = _LETTERS.get(letter, letter)
    if not dash or not kind or letter not in "BIES" or len(letter) != 1:
        raise ValueError(tag)
    return letter, kind


def find_scheme(rows: Iterable[Sequence[str]], where: Callable[[int], str]) -> str:
    """Finds the scheme of entities' tags. `where` tells the place of a row, for messages.

    Raises InputError for what is no tag, and where entities begin with B- in some places and with
    I- in others, which is neither IOB2 nor IOB1.
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
                    "I-TYPE, and E-TYPE or S-TYPE in BIOES; mend the row, or give task.scheme=none "
                    "where each tag is of one word"
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
            f"{where(number)}: word {word + 1} begins an entity with I-, another begins with B- at "
            f"{where(other)}; IOB2 begins each with B-: mend the file, or read it all as "
            f"task.scheme=iob1; {len(odd)} of {count} rows begin an entity with I-"
        )
    return "iob1" if "I" in begun else "iob2"


def find_entities(tags: Sequence[str], scheme: str) -> list[Entity]:
    """Finds the entities of a text. Raises ValueError with the index of a word whose tag is wrong.

    In IOB1 every tag is right; in IOB2 an entity begins with B-; in BIOES it also ends with E-.
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
    """Writes entities that do not overlap as the IOB2 tags of so many words."""
    tags = [OUTSIDE] * words
    for kind, start, end in entities:
        tags[start:end] = [f"B-{kind}"] + [f"I-{kind}"] * (end - start - 1)
    return tags


def to_iob2(tags: Sequence[str], scheme: str, where: str) -> list[str]:
    """Makes the tags of a text IOB2, but those without a scheme.

    Raises InputError for one that its scheme does not have.
    """
    if scheme == NO_SCHEME:
        return list(tags)
    try:
        return write_iob2(find_entities(tags, scheme), len(tags))
    except ValueError as error:
        (at,) = error.args
        if isinstance(at, str):
            raise InputError(
                f"{where}: word {tags.index(at) + 1} has {at!r}, which is no tag, as in O, B-PER, "
                "I-PER; mend the row"
            ) from None
        tag = tags[at] if at < len(tags) else "the end"
        before = tags[at - 1] if at else "the beginning"
        raise IllegalTag(
            f"{where}: word {at + 1} has {tag!r} behind {before!r}, which task.scheme={scheme} "
            f"does not have ({_RULES[scheme]}); mend the row, or give another scheme"
        ) from None


def labels_of(types: Iterable[str]) -> tuple[str, ...]:
    """Lists the IOB2 tags of some types of entities: O first, then B- and I- of each by name."""
    pairs = ((f"B-{kind}", f"I-{kind}") for kind in sorted(set(types)))
    return (OUTSIDE, *(tag for pair in pairs for tag in pair))


def lenient_entities(tags: Sequence[str]) -> list[Entity]:
    """Finds the entities of predicted IOB2 tags, where an I- may also begin one, as conlleval."""
    return find_entities(tags, "iob1")
