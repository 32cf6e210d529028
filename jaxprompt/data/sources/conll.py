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
_DOCSTART = "-DOCSTART-"  # the word of a line between documents of CoNLL-2003
_WORD_COLUMN, _ENTITY_COLUMN, _FIRST_ROLE = (
    3,
    10,
    11,
)  # columns of CoNLL-2012; the last is that of coreference
_NAME = r"[^()*\s]+"
_BRACKET = re.compile(rf"(?:\((?P<opens>{_NAME}))?\*(?P<closes>(?:{_NAME})?\))?")
_ONE_WORD = re.compile(rf"\(({_NAME})\)")  # an entity of one word

ConllRow = dict[str, Any]


class Sentence(NamedTuple):
    """The lines of one sentence, split into columns; one line per word."""

    first: int  # number of its first line
    lines: list[list[str]]

    def column(self, index: int) -> list[str]:
        """Returns one column, a cell per word."""
        return [cells[index] for cells in self.lines]


def read_tagged_file(
    lines: Iterable[str], path: str, *, roles: bool = True
) -> tuple[list[ConllRow], list[int]]:
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
    if not fixed and not any("*" in cells[-1] for s in sentences for cells in s.lines):
        return _read_tags(sentences, path)
    if fixed and not roles:
        return [_read_entities(s, path) for s in sentences], [s.first for s in sentences]
    rows, line_numbers = [], []
    for sentence in sentences:
        words, indices, columns = (_parse_2012 if fixed else _parse_2005)(sentence, path)
        if not indices:
            continue
        where = _word_locator(sentence, path)
        tags = [read_brackets(sentence.column(column), where) for column in columns]
        if fixed:  # there every lemma has a column, even without roles
            indices = [_predicate(*pair, where) for pair in zip(tags, columns, strict=True)]
        rows.append({"tokens": words, "predicate": indices, "tags": tags})
        line_numbers.append(sentence.first)
    if sentences and not rows:
        raise InputError(f"{path}: no sentence has a predicate; use a file with semantic roles")
    return rows, line_numbers


def read_brackets(
    cells: Sequence[str], where: Callable[[int], str], kind: str = "a role"
) -> list[str]:
    """Reads a column of roles, "(A0*", "*", "*)" or "(A0*)", as IOB2.

    Args:
      cells: the cells of the column, one per word.
      where: returns the file and the line of a word, for messages.
      kind: what a span is called in messages.

    Raises:
      InputError: if a cell has another form, a span is inside another or is not closed.
    """
    tags, role, start = [], "", 0  # the open role, "" = none, and its first word
    for word, cell in enumerate(cells):
        match = _BRACKET.fullmatch(cell)
        if not match:
            raise InputError(
                f"{where(word)}: {cell!r} is not valid for {kind}; write (A0*, *, *) or (A0*)"
            )
        if match["opens"] and role:
            raise InputError(
                f"{where(word)}: {cell!r} opens {kind} inside {role}, which {where(start)} opened; "
                f"close {role} first, because spans of one column cannot overlap"
            )
        if match["opens"]:
            role, start = match["opens"], word
            tags.append(f"B-{role}")
        else:
            tags.append(f"I-{role}" if role else "O")
        if not match["closes"]:
            continue
        if match["closes"] not in (")", f"{role})") or not role:
            raise InputError(
                f"{where(word)}: {cell!r} closes {kind}, but {role or 'none'} is open; open it "
                "first, as in (A0*, or remove the bracket"
            )
        role = ""
    if role:
        raise InputError(
            f"{where(start)}: {cells[start]!r} opens {kind} that is not closed in its sentence; "
            "write *) at its last word"
        )
    return tags


def _read_lines(lines: Sequence[str], path: str) -> tuple[list[ConllRow], list[int]]:
    """Reads "index tok tok ... ||| tag tag ...", one predicate per line."""
    rows, line_numbers = [], []
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
        rows.append({"tokens": words, "predicate": int(index), "tags": _cells(right)})
        line_numbers.append(number)
    return rows, line_numbers


def _cells(line: str) -> list[str]:
    """Splits a line at spaces and tabs; other white space, as in 10\u00a0000, is part of a word."""
    return [cell for cell in re.split(r"[ \t\r\n]+", line) if cell] if line.strip() else []


def _sentences(lines: Iterable[str], path: str) -> Iterator[Sentence]:
    """Yields sentences, which blank lines and ends of documents separate."""
    first = 0
    rows: list[list[str]] = []
    # A blank line at the end ends the last sentence.
    for number, line in enumerate([*lines, ""], 1):
        cells = _cells(line)
        if not cells or line.startswith(_DOCUMENT) or cells[0] == _DOCSTART:
            if rows:
                yield Sentence(first, rows)
            rows = []
            continue
        if rows and len(cells) != len(rows[0]):
            raise InputError(
                f"{path}:{number}: this line has {len(cells)} columns, but line {first}, where the "
                f"sentence begins, has {len(rows[0])}; fix the line, or put a blank line between "
                "sentences"
            )
        first = first if rows else number
        rows.append(cells)


def _word_locator(sentence: Sentence, path: str) -> Callable[[int], str]:
    return lambda word: f"{path}:{sentence.first + word}"


def _parse_2005(sentence: Sentence, path: str) -> tuple[list[str], list[int], list[int]]:
    """Returns words, predicates and the indices of the columns of roles, which follow these."""
    width = len(sentence.lines[0])
    # Columns of syntax and entities also have a "*" in every cell, but precede the predicates.
    predicate_column = max(
        (i for i in range(width) if any("*" not in c for c in sentence.column(i))), default=-1
    )
    if predicate_column < 1:
        raise InputError(
            f"{path}:{sentence.first}: there is no column of words before the predicates; add one, "
            "e.g. by joining the words and props files with paste"
        )
    indices = [i for i, lemma in enumerate(sentence.column(predicate_column)) if lemma != "-"]
    if len(indices) != width - predicate_column - 1:
        raise InputError(
            f"{path}:{sentence.first}: column {predicate_column + 1} has {len(indices)} "
            f"predicates, but {width - predicate_column - 1} columns of roles follow it; give one "
            "column of roles per predicate (- means no predicate)"
        )
    return sentence.column(0), indices, list(range(predicate_column + 1, width))


def _parse_2012(sentence: Sentence, path: str) -> tuple[list[str], list[int], list[int]]:
    """Returns words and, instead of predicates, twice the indices of the columns of roles."""
    columns = list(range(_FIRST_ROLE, _width_of_2012(sentence, path) - 1))
    return sentence.column(_WORD_COLUMN), columns, columns


def _read_entities(sentence: Sentence, path: str) -> ConllRow:
    """Reads words and entities, "(GPE*", "*)", "(GPE)", of a sentence of CoNLL-2012."""
    _width_of_2012(sentence, path)
    cells = [_ONE_WORD.sub(r"(\1*)", cell) for cell in sentence.column(_ENTITY_COLUMN)]
    tags = read_brackets(cells, _word_locator(sentence, path), "an entity")
    return {"tokens": sentence.column(_WORD_COLUMN), "tags": tags}


def _width_of_2012(sentence: Sentence, path: str) -> int:
    width = len(sentence.lines[0])
    if width <= _FIRST_ROLE:
        raise InputError(
            f"{path}:{sentence.first}: {width} columns, but CoNLL-2012 has {_FIRST_ROLE + 1} or "
            "more; fix the line"
        )
    return width


def _predicate(tags: Sequence[str], column: int, where: Callable[[int], str]) -> int:
    """Returns the predicate of a column of roles, the word whose role is V."""
    if "B-V" not in tags:
        raise InputError(
            f"{where(0)}: column {column + 1} has roles but no (V*), which marks their predicate; "
            "add it, or remove the column"
        )
    return tags.index("B-V")


def _read_tags(sentences: Sequence[Sentence], path: str) -> tuple[list[ConllRow], list[int]]:
    """Reads the word first and its tag last; words may be numbered, from 0 or 1 on."""
    for sentence in sentences:
        if len(sentence.lines[0]) < 2:
            raise InputError(
                f"{path}:{sentence.first}: {' '.join(sentence.lines[0])!r:.40} is a word without a "
                "tag; write a word and a tag, or index, words, ||| and tags on one line"
            )
    numbered = any(all(_is_numbered(sentence, first) for sentence in sentences) for first in (0, 1))
    rows = [
        {"tokens": sentence.column(int(numbered)), "tags": sentence.column(-1)}
        for sentence in sentences
    ]
    return rows, [sentence.first for sentence in sentences]


def _is_numbered(sentence: Sentence, first: int) -> bool:
    """Returns whether the words of a sentence are numbered in the first column."""
    numbers = [str(number) for number in range(first, first + len(sentence.lines))]
    return len(sentence.lines[0]) > 2 and sentence.column(0) == numbers
