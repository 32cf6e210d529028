"""Reads files of sentences whose words have tags, in the formats of CoNLL and P-tuning v2.

The format is detected from the first lines:

    3 The cat has eaten ||| B-A0 I-A0 O B-V    one line per predicate: its index, words, tags
    #begin document (wb/a2e/00/a2e_0000)       CoNLL-2012, "*_gold_conll": fixed columns, with
                                               roles and entities among them
    cat NN ... - *) *                          CoNLL-2005: the word first; the last columns are
                                               the predicates (a lemma or -) and the roles of each
    cat NN ... O                               the word first (after its number if it has one), the
                                               tag last

A row of roles has `tokens`, `predicate` (the index of a word, or a list of them) and `tags` (a list
in IOB2, or a list of lists); a row of other tags has `tokens` and `tags`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxprompt.errors import InputError

FORMATS = (".txt", ".conll", ".conllx", ".props", ".gold_conll", ".v4_gold_conll")
_BAR = "|||"
_DOCUMENT = ("#begin document", "#end document")
_START = "-DOCSTART-"  # the word of a line between documents of CoNLL-2003
_WORD, _ENTITIES, _ROLES = 3, 10, 11  # columns of CoNLL-2012; the last is that of coreference
_NAME = r"[^()*\s]+"
_BRACKET = re.compile(rf"(?:\((?P<opens>{_NAME}))?\*(?P<closes>(?:{_NAME})?\))?")
_ALONE = re.compile(rf"\(({_NAME})\)")  # an entity of one word

Row = dict[str, Any]


class Sentence(NamedTuple):
    """The lines of one sentence, split into columns; one line per word."""

    first: int  # number of its first line
    lines: list[list[str]]

    def column(self, index: int) -> list[str]:
        """Returns one column, a cell per word."""
        return [cells[index] for cells in self.lines]


def read_tagged_file(
    lines: Iterable[str], path: str, *, roles: bool = True
) -> tuple[list[Row], list[int]]:
    """Reads the lines of a file in one of the formats above.

    Args:
      lines: the lines of the file.
      path: path of the file, for messages.
      roles: what to read from CoNLL-2012: the roles of sentences that have a predicate, or with
        False the entities of all sentences.

    Returns:
      The rows, and the number of the first line of each.

    Raises:
      InputError: with the file and the line, if the text is in none of the formats.
    """
    lines = list(lines)
    first = next((line for line in lines if line.strip()), "")
    if _BAR in first:
        return _read_lines(lines, path)
    sentences = list(_sentences(lines, path))
    fixed = first.startswith(_DOCUMENT)
    if not fixed and not any("*" in cells[-1] for own in sentences for cells in own.lines):
        return _read_tags(sentences, path)
    if fixed and not roles:
        return [_entities(own, path) for own in sentences], [own.first for own in sentences]
    found, numbers = [], []
    for sentence in sentences:
        words, indices, columns = (_of_2012 if fixed else _of_2005)(sentence, path)
        if not indices:
            continue
        where = _places(sentence, path)
        tags = [read_brackets(sentence.column(column), where) for column in columns]
        if fixed:  # every lemma has a column of its own there, also of words without roles
            indices = [_verb(own, column, where) for own, column in zip(tags, columns, strict=True)]
        found.append({"tokens": words, "predicate": indices, "tags": tags})
        numbers.append(sentence.first)
    if sentences and not found:
        raise InputError(f"{path}: no sentence has a predicate; use a file with semantic roles")
    return found, numbers


def read_brackets(
    cells: Sequence[str], where: Callable[[int], str], what: str = "a role"
) -> list[str]:
    """Reads a column of roles, "(A0*", "*", "*)" or "(A0*)", as IOB2.

    Args:
      cells: the cells of the column, one per word.
      where: returns the file and the line of a word, for messages.
      what: what the brackets stand for, for messages.

    Raises:
      InputError: if a cell has another form, a span is inside another or is not closed.
    """
    tags, role, start = [], "", 0  # the role that is open, "" = none, and its first word
    for word, cell in enumerate(cells):
        found = _BRACKET.fullmatch(cell)
        if not found:
            raise InputError(
                f"{where(word)}: {cell!r} is not valid for {what}; write (A0*, *, *) or (A0*)"
            )
        if found["opens"] and role:
            raise InputError(
                f"{where(word)}: {cell!r} opens {what} inside {role}, which {where(start)} opened; "
                f"close {role} first, because spans of one column cannot overlap"
            )
        if found["opens"]:
            role, start = found["opens"], word
            tags.append(f"B-{role}")
        else:
            tags.append(f"I-{role}" if role else "O")
        if not found["closes"]:
            continue
        if found["closes"] not in (")", f"{role})") or not role:
            raise InputError(
                f"{where(word)}: {cell!r} closes {what}, but {role or 'none'} is open; open it "
                "first, as in (A0*, or remove the bracket"
            )
        role = ""
    if role:
        raise InputError(
            f"{where(start)}: {cells[start]!r} opens {what} that is not closed in its sentence; "
            "write *) at its last word"
        )
    return tags


def _read_lines(lines: Sequence[str], path: str) -> tuple[list[Row], list[int]]:
    """Reads "index tok tok ... ||| tag tag ...", one predicate per line."""
    found, numbers = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        left, bar, right = line.partition(_BAR)
        index, *words = _cells(left) or [""]
        if not bar or not words or not re.fullmatch("-?[0-9]{1,9}", index):
            raise InputError(
                f"{path}:{number}: {line.strip()!r:.60} must be the index of the predicate, the "
                f"words, {_BAR} and one tag per word; fix or remove this line"
            )
        found.append({"tokens": words, "predicate": int(index), "tags": _cells(right)})
        numbers.append(number)
    return found, numbers


def _cells(line: str) -> list[str]:
    """Splits a line at spaces and tabs; other white space, as in 10\u00a0000, is part of a word."""
    return [cell for cell in re.split(r"[ \t\r\n]+", line) if cell] if line.strip() else []


def _sentences(lines: Iterable[str], path: str) -> Iterator[Sentence]:
    """Yields sentences, which blank lines and ends of documents separate."""
    first = 0
    own: list[list[str]] = []
    # A blank line at the end closes the last sentence.
    for number, line in enumerate([*lines, ""], 1):
        cells = _cells(line)
        if not cells or line.startswith(_DOCUMENT) or cells[0] == _START:
            if own:
                yield Sentence(first, own)
            own = []
            continue
        if own and len(cells) != len(own[0]):
            raise InputError(
                f"{path}:{number}: this line has {len(cells)} columns, but line {first}, where the "
                f"sentence begins, has {len(own[0])}; fix the line, or put a blank line between "
                "sentences"
            )
        first = first if own else number
        own.append(cells)


def _places(sentence: Sentence, path: str) -> Callable[[int], str]:
    return lambda word: f"{path}:{sentence.first + word}"


def _of_2005(sentence: Sentence, path: str) -> tuple[list[str], list[int], list[int]]:
    """Finds words, predicates and the columns of roles, which follow the predicates."""
    width = len(sentence.lines[0])
    # Syntax and entities have a "*" in every cell too, and stand in front of the predicates.
    at = max((i for i in range(width) if any("*" not in c for c in sentence.column(i))), default=-1)
    if at < 1:
        raise InputError(
            f"{path}:{sentence.first}: there is no column of words before the predicates; add one, "
            "e.g. by joining the words and props files with paste"
        )
    indices = [i for i, lemma in enumerate(sentence.column(at)) if lemma != "-"]
    if len(indices) != width - at - 1:
        raise InputError(
            f"{path}:{sentence.first}: column {at + 1} has {len(indices)} predicates, but "
            f"{width - at - 1} columns of roles follow it; give one column of roles per predicate "
            "(- means no predicate)"
        )
    return sentence.column(0), indices, list(range(at + 1, width))


def _of_2012(sentence: Sentence, path: str) -> tuple[list[str], list[int], list[int]]:
    """Finds words and columns of roles; returns the columns as predicates."""
    columns = list(range(_ROLES, _width_of_2012(sentence, path) - 1))
    return sentence.column(_WORD), columns, columns


def _entities(sentence: Sentence, path: str) -> Row:
    """Reads words and entities, "(GPE*", "*)", "(GPE)", of a sentence of CoNLL-2012."""
    _width_of_2012(sentence, path)
    cells = [_ALONE.sub(r"(\1*)", cell) for cell in sentence.column(_ENTITIES)]
    tags = read_brackets(cells, _places(sentence, path), "an entity")
    return {"tokens": sentence.column(_WORD), "tags": tags}


def _width_of_2012(sentence: Sentence, path: str) -> int:
    width = len(sentence.lines[0])
    if width <= _ROLES:
        raise InputError(
            f"{path}:{sentence.first}: {width} columns, but CoNLL-2012 has {_ROLES + 1} or more; "
            "fix the line"
        )
    return width


def _verb(tags: Sequence[str], column: int, where: Callable[[int], str]) -> int:
    """Finds the predicate of a column of roles, the word whose role is V."""
    if "B-V" not in tags:
        raise InputError(
            f"{where(0)}: column {column + 1} has roles but no (V*), which marks their predicate; "
            "add it, or remove the column"
        )
    return tags.index("B-V")


def _read_tags(sentences: Sequence[Sentence], path: str) -> tuple[list[Row], list[int]]:
    """Reads the word first and its tag last; words may be numbered, from 0 or 1 on."""
    for sentence in sentences:
        if len(sentence.lines[0]) < 2:
            raise InputError(
                f"{path}:{sentence.first}: {' '.join(sentence.lines[0])!r:.40} is a word without a "
                "tag; write a word and a tag, or index, words, ||| and tags on one line"
            )
    numbered = any(all(_counts(own, first) for own in sentences) for first in (0, 1))
    found = [{"tokens": own.column(int(numbered)), "tags": own.column(-1)} for own in sentences]
    return found, [own.first for own in sentences]


def _counts(sentence: Sentence, first: int) -> bool:
    """Returns whether the words of a sentence are numbered in the first column."""
    numbers = [str(number) for number in range(first, first + len(sentence.lines))]
    return len(sentence.lines[0]) > 2 and sentence.column(0) == numbers
