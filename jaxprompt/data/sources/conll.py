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
from functools import partial
from typing import Any, NamedTuple

from jaxprompt.data.rows import Rows
from jaxprompt.errors import InputError

FORMATS = (".txt", ".conll", ".conllx", ".props", ".gold_conll", ".v4_gold_conll")
_BAR = "|||"
_DOCUMENT = ("#begin document", "#end document")
_DOCSTART = "-DOCSTART-"  # the word of a line between documents of CoNLL-2003
# Columns of CoNLL-2012; the last is that of coreference.
_WORD_COLUMN = 3
_ENTITY_COLUMN = 10
_FIRST_ROLE = 11
_NAME = r"[^()*\s]+"
_BRACKET = re.compile(rf"(?:\((?P<opens>{_NAME}))?\*(?P<closes>(?:{_NAME})?\))?")
_ONE_WORD = re.compile(rf"\(({_NAME})\)")  # an entity of one word

ConllRow = dict[str, Any]


class Sentence(NamedTuple):
    """The lines of one sentence, split into columns; one line per word."""

    path: str
    first: int  # number of its first line
    lines: list[list[str]]

    def column(self, index: int) -> list[str]:
        """Returns one column, a cell per word."""
        return [cells[index] for cells in self.lines]

    def origin(self, word: int = 0) -> str:
        """Returns the file and the line of a word."""
        return f"{self.path}:{self.first + word}"


def read_tagged_file(lines: Iterable[str], path: str, *, roles: bool = True) -> Rows:
    """Reads the lines of a file in one of the formats above.

    Args:
      lines: the lines of the file.
      path: path of the file, for messages.
      roles: what to read from CoNLL-2012: the roles of sentences that have a predicate, or with
        False the entities of all sentences.

    Raises:
      InputError: with the file and the line, if the text is in none of the formats.
    """
    lines = list(lines)
    first = next((line for line in lines if line.strip()), "")
    if _BAR in first:
        return _read_lines(lines, path)
    sentences = list(_sentences(lines, path))
    read: Callable[[Sentence], ConllRow]
    if first.startswith(_DOCUMENT):
        for sentence in sentences:
            if len(sentence.lines[0]) <= _FIRST_ROLE:
                raise InputError(
                    f"{sentence.origin()}: {len(sentence.lines[0])} columns, but CoNLL-2012 has "
                    f"{_FIRST_ROLE + 1} or more; fix the line"
                )
        read = _read_roles_2012 if roles else _read_entities
    elif any("*" in cells[-1] for s in sentences for cells in s.lines):
        read = _read_roles_2005
    else:
        is_numbered = any(all(_is_numbered(s, start) for s in sentences) for start in (0, 1))
        read = partial(_read_tags, word_column=int(is_numbered))
    numbered_rows = [(sentence.first, read(sentence)) for sentence in sentences]
    # Sentences without a predicate are left out.
    rows = [(number, row) for number, row in numbered_rows if row.get("predicate") != []]
    if sentences and not rows:
        raise InputError(f"{path}: no sentence has a predicate; use a file with semantic roles")
    return Rows([row for _, row in rows], path, [number for number, _ in rows])


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
    tags, open_role = [], ""
    for word, cell in enumerate(cells):
        match = _BRACKET.fullmatch(cell)
        opens, closes = match.group("opens", "closes") if match else (None, None)
        role = opens or open_role
        is_closable = bool(role) and closes in (")", f"{role})")
        if not match or (opens and open_role) or (closes and not is_closable):
            raise InputError(
                f"{where(word)}: {cell!r} is not valid for {kind} where {open_role or 'none'} is "
                "open; write (A0*, *, *) or (A0*) for spans that do not overlap"
            )
        tags.append(f"{'B' if opens else 'I'}-{role}" if role else "O")
        open_role = "" if closes else role
    if open_role:
        raise InputError(
            f"{where(len(cells) - 1)}: {kind}, {open_role}, is not closed in its sentence; write "
            "*) at its last word"
        )
    return tags


def _read_lines(lines: Sequence[str], path: str) -> Rows:
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
    return Rows(rows, path, line_numbers)


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
                yield Sentence(path, first, rows)
            rows = []
            continue
        if rows and len(cells) != len(rows[0]):
            raise InputError(
                f"{path}:{number}: this line has {len(cells)} columns, but line {first}, where the "
                f"sentence begins, has {len(rows[0])}; fix the line, put a blank line between "
                "sentences, or name a table .csv or .tsv"
            )
        first = first if rows else number
        rows.append(cells)


def _read_roles_2005(sentence: Sentence) -> ConllRow:
    width = len(sentence.lines[0])
    # Columns of syntax and entities also have a "*" in every cell, but precede the predicates.
    predicate_column = max(
        (i for i in range(width) if any("*" not in c for c in sentence.column(i))), default=-1
    )
    if predicate_column < 1:
        raise InputError(
            f"{sentence.origin()}: there is no column of words before the predicates; add one, "
            "e.g. by joining the words and props files with paste"
        )
    indices = [i for i, lemma in enumerate(sentence.column(predicate_column)) if lemma != "-"]
    columns = range(predicate_column + 1, width)
    if len(indices) != len(columns):
        raise InputError(
            f"{sentence.origin()}: column {predicate_column + 1} has {len(indices)} "
            f"predicates, but {len(columns)} columns of roles follow it; give one "
            "column of roles per predicate (- means no predicate)"
        )
    tags = [read_brackets(sentence.column(column), sentence.origin) for column in columns]
    return {"tokens": sentence.column(0), "predicate": indices, "tags": tags}


def _read_roles_2012(sentence: Sentence) -> ConllRow:
    columns = range(_FIRST_ROLE, len(sentence.lines[0]) - 1)
    tags = [read_brackets(sentence.column(column), sentence.origin) for column in columns]
    for column, tags_of_one in zip(columns, tags, strict=True):
        if "B-V" not in tags_of_one:
            raise InputError(
                f"{sentence.origin()}: column {column + 1} has roles but no (V*), which marks "
                "their predicate; add it, or remove the column"
            )
    # Every lemma has a column there, even without roles, so predicates are found by their role.
    indices = [tags_of_one.index("B-V") for tags_of_one in tags]
    return {"tokens": sentence.column(_WORD_COLUMN), "predicate": indices, "tags": tags}


def _read_entities(sentence: Sentence) -> ConllRow:
    """Reads words and entities, "(GPE*", "*)", "(GPE)", of a sentence of CoNLL-2012."""
    cells = [_ONE_WORD.sub(r"(\1*)", cell) for cell in sentence.column(_ENTITY_COLUMN)]
    tags = read_brackets(cells, sentence.origin, "an entity")
    return {"tokens": sentence.column(_WORD_COLUMN), "tags": tags}


def _read_tags(sentence: Sentence, word_column: int) -> ConllRow:
    if len(sentence.lines[0]) < 2:
        raise InputError(
            f"{sentence.origin()}: {sentence.lines[0][0]!r:.40} is a word without a tag; write a "
            "word and a tag, or index, words, ||| and tags on one line"
        )
    return {"tokens": sentence.column(word_column), "tags": sentence.column(-1)}


def _is_numbered(sentence: Sentence, first: int) -> bool:
    """Returns whether the words of a sentence are numbered in the first column."""
    numbers = [str(number) for number in range(first, first + len(sentence.lines))]
    return len(sentence.lines[0]) > 2 and sentence.column(0) == numbers
