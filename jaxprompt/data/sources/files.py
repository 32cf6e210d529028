"""Reads the rows of one local file: JSON lines, JSON, CSV, TSV, Parquet, or tagged sentences.

Every problem with a file is an InputError with the file and, if there is one, the line.
"""

import csv
import gzip
import io
import os
import re
import shlex
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxprompt.data.rows import Rows
from jaxprompt.data.sources import conll
from jaxprompt.errors import InputError
from jaxprompt.files import parse_json, user_path, utf8_advice

FORMATS = (".jsonl", ".json", ".csv", ".tsv", *conll.FORMATS, ".parquet")
_FOLDER = "is a folder, not a file; name a file in it, or give the folder as data.source"
# The header of SNLI's train.tsv in GLUE ends so; rows that five people labelled have label2 to
# label5 between these two.
_SNLI_LABELS, _SNLI_MORE = ["label1", "gold_label"], 4
_QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a cell in quotes, those inside it doubled
_SEP = re.compile(r"sep=([,;\t])[,;]*\s*$", re.I)  # Excel's first line: what divides the cells
# Parquet is packed by itself.
SUFFIXES = (*FORMATS, *(kind + ".gz" for kind in FORMATS[:-1]))


def read_file(path: str | Path, columns: Sequence[str] = ()) -> Rows:
    """Reads one file; its format is detected from its name, which ends in one of SUFFIXES.

    Args:
      path: path of the file.
      columns: column names of a row that is a list in JSON, and of a CSV or TSV without a header.
        Without `predicate` among them, entities are read from CoNLL-2012, not roles.
    """
    path = user_path(path)
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if path.suffix == ".parquet":
        rows = _read_parquet(path)
    elif kind == ".json":
        rows = _read_json(path, columns)
    elif kind == ".tsv":
        rows = _read_tsv(path, columns)
    elif kind == ".jsonl" or (kind == ".txt" and _holds_json(path)):
        rows = _read_jsonl(path)
    elif kind in conll.FORMATS:
        roles = not columns or "predicate" in columns
        found, numbers = conll.read_tagged_file(_lines(path), str(path), roles=roles)
        rows = Rows(found, str(path), numbers)
    elif kind == ".csv":
        rows = _read_csv(path, columns)
    elif os.path.isdir(path):
        raise InputError(f"{path}: {_FOLDER}")
    else:
        raise InputError(
            f"{path}: unknown file format; the name must end in {', '.join(FORMATS)}, followed by "
            ".gz if a text file is compressed"
        )
    if not len(rows):
        raise InputError(f"{path}: the file has no rows")
    return rows


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns exceptions raised while `path` is read into an InputError."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path}: {_FOLDER}") from None
    except PermissionError:
        raise InputError(f"{path}: no permission to read it; check its mode and owner") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: broken gzip file ({error}); copy or compress it again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


@contextmanager
def unpacking(path: Path) -> Iterator[io.BufferedIOBase]:
    """Opens a file, decompressed if its name ends in .gz.

    Raises EOFError for a .gz of 0 bytes, which gzip reads as an empty file: failed downloads leave
    such files.
    """
    with open(path, "rb") as raw:
        if path.suffix != ".gz":
            yield raw
        elif raw.peek(1):
            yield gzip.GzipFile(fileobj=raw)
        else:
            raise EOFError("it has 0 bytes")


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, gzipped or not, with their line ends."""
    with reading(path), unpacking(path) as file:
        yield from file


def decode_line(line: bytes, number: int, path: Path | str) -> str:
    """Decodes line `number`, counted from 1; a byte order mark in line 1 is dropped."""
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise InputError(
            f"{path}:{number}: not UTF-8 (byte 0x{byte:02x} at column {error.start + 1}); "
            f"{utf8_advice(line if number == 1 else b'')}"
        ) from None


def _lines(path: Path) -> Iterator[str]:
    return (decode_line(line, number, path) for number, line in enumerate(raw_lines(path), 1))


def _holds_json(path: Path) -> bool:
    """Returns whether a text file begins with an object, as SciBERT's and OpenNRE's .txt do."""
    first = next((line for line in _lines(path) if line.strip()), "")
    return re.match(r'\s*\{\s*"', first) is not None


def _read_jsonl(path: Path) -> Rows:
    rows, numbers, lines = [], array("q"), raw_lines(path)
    try:
        for number, line in enumerate(lines, 1):
            if text := decode_line(line, number, path).strip():
                rows.append(parse_row(text, f"{path}:{number}"))
                numbers.append(number)
    except InputError:
        # A .gz that is damaged has odd lines, and says so itself where it ends.
        for _ in lines:
            pass
        raise
    return Rows(rows, str(path), numbers)


def _read_json(path: Path, columns: Sequence[str]) -> Rows:
    text = "".join(_lines(path))
    if _holds_lines(text):
        return _read_jsonl(path)
    rows = _parsed(text, str(path))
    if isinstance(rows, dict):  # SQuAD and its kin: {"version": ..., "data": [...]}
        rows = rows.get("data")
    if not isinstance(rows, list):
        raise InputError(
            f'{path}: must be a list of objects, or an object whose "data" is such a list; name a '
            "file with one object per line .jsonl"
        )
    is_row = lambda row: isinstance(row, list) and len(row) == len(columns) > 0
    rows = [dict(zip(columns, row, strict=True)) if is_row(row) else row for row in rows]
    return Rows([_row(row, f"{path}: row {i}") for i, row in enumerate(rows, 1)], str(path))


def _holds_lines(text: str) -> bool:
    """Returns whether a .json has one object per line, as CLUE's files do."""
    first, _, rest = text.strip().partition("\n")
    if not (first.startswith("{") and rest.lstrip().startswith("{")):
        return False
    try:
        return isinstance(parse_json(first), dict)
    except ValueError:
        return False


def parse_row(text: str, where: str) -> dict[str, Any]:
    """Parses one row of JSON; `where` ("file:line") starts the message of an InputError."""
    return _row(_parsed(text, where), where)


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(f"{where}: broken JSON ({error}); fix or remove this line") from None


def _row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        cure = (
            "; a file that is one list of rows must be named .json"
            if isinstance(value, list)
            else ""
        )
        raise InputError(
            f"{where}: a row must be an object {{column: value}}, got {value!r:.40}{cure}"
        )
    return value


def _read_csv(path: Path, columns: Sequence[str]) -> Rows:
    """Reads CSV with double quotes, its cells separated by commas, semicolons or tabs."""
    lines = list(_lines(path))
    given = _SEP.match(lines[0]) if lines else None
    if given:
        lines[0] = "\n"
    # Lines keep their ends, which a quoted cell may hold.
    first = next((line for line in lines if line.strip()), "")
    mark = given[1] if given else _delimiter(first)
    return _table(path, lines, _unnamed(_cells(first, mark), columns), delimiter=mark, strict=True)


def _delimiter(first: str) -> str:
    """Finds the delimiter: a comma, or if the line has none, the one that gives most cells."""
    count = lambda mark: len(_cells(first, mark))
    return "," if count(",") > 1 else max(",;\t", key=count)


def _cells(line: str, mark: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=mark), [])
    except csv.Error:  # told where the rows are read
        return []


def _unnamed(cells: Sequence[str], columns: Sequence[str]) -> Sequence[str] | None:
    """Returns `columns` if the first row holds values: it names none of them, and has a number."""
    is_row = len(cells) == len(columns) and not set(cells) & set(columns)
    return columns if is_row and any(map(str.isdecimal, cells)) else None


def _read_tsv(path: Path, columns: Sequence[str]) -> Rows:
    """Reads TSV with or without double quotes, and without a header if its first row is data.

    GLUE's files do not quote, so a quote may begin a cell and never end; pandas and spreadsheets
    quote cells that contain a tab, a quote or a line end.
    """
    lines = list(_lines(path))
    cells = next((line for line in lines if line.strip()), "").rstrip("\r\n").split("\t")
    header = _unnamed(cells, columns)
    quoted = lambda: _table(path, lines, header, delimiter="\t", strict=True)
    try:
        rows = _table(path, lines, header, delimiter="\t", quoting=csv.QUOTE_NONE)
    except InputError:
        try:
            return quoted()
        except InputError:
            pass
        raise
    # Read without quotes first: that fails on no quote, and shows the cells as they stand.
    return quoted() if _is_quoted(rows) else rows


def _is_quoted(rows: Sequence[dict[str, str]]) -> bool:
    """Tells from the raw cells whether a file quotes: all that begins with a quote is well-formed,
    and one of them could not stand there without, or the header is quoted throughout.
    """
    if not len(rows):
        return False
    cells = [*rows[0], *(cell for row in rows for cell in row.values())]
    opened = [cell for cell in cells if cell.startswith('"')]
    if not opened or not all(map(_QUOTED.fullmatch, opened)):
        return False
    return any('""' in cell[1:-1] for cell in opened) or all(map(_QUOTED.fullmatch, rows[0]))


def _table(
    path: Path, lines: Sequence[str], header: Sequence[str] | None = None, **style: Any
) -> Rows:
    csv.field_size_limit(1 << 30)  # documents are longer than the default of 128 KiB
    reader = csv.reader(lines, **style)
    rows, numbers, start, longer = [], array("q"), 1, -1
    try:
        for cells in reader:
            if not cells:
                pass
            elif header is None:
                header = _header(cells, path)
                longer = len(header) + _SNLI_MORE if header[-2:] == _SNLI_LABELS else -1
            elif len(cells) == longer:
                rows.append(dict(zip(header, [*cells[: len(header) - 1], cells[-1]], strict=True)))
                numbers.append(start)
            elif len(cells) != len(header):
                mark = {",": "comma", ";": "semicolon", "\t": "tab"}[style["delimiter"]]
                cure = f"fix the row, and put cells that contain a {mark} in double quotes"
                # Of GLUE's QQP a few rows end early.
                if len(cells) < len(header) and "quoting" in style and path.suffix == ".tsv":
                    only = f"awk -F'\\t' 'NF == {len(header)}' {shlex.quote(str(path))} > whole.tsv"
                    cure = f"fix the row, or remove all such rows: {only}"
                raise InputError(
                    f"{path}:{start}: {len(cells)} cells, but the header has {len(header)} "
                    f"({', '.join(header)}); {cure}"
                )
            else:
                rows.append(dict(zip(header, cells, strict=True)))
                numbers.append(start)
            # A quoted cell may span lines: messages name the line where its row begins.
            start = reader.line_num + 1
    except csv.Error as error:
        cure = "fix its quotes"
        if "\r" in lines[start - 1].rstrip("\r\n"):
            name = shlex.quote(path.name)
            cure = (
                "quote the cell with the carriage return, or replace that by a space: "
                f"sed 's/\\r\\(.\\)/ \\1/g' {name}"
            )
            if len(lines) == 1:  # as old Macs end lines
                cure = f"end its lines with a line feed, e.g. by tr '\\r' '\\n' < {name}"
        raise InputError(f"{path}:{start}: broken row ({error}); {cure}") from None
    return Rows(rows, str(path), numbers)


def _header(cells: list[str], path: Path) -> list[str]:
    """Checks the column names. The first may be empty: pandas writes its index that way."""
    if "" in cells[1:] or len(set(cells)) < len(cells):
        raise InputError(
            f"{path}:1: the header must name every column once, got: {', '.join(cells)}; fix the "
            "first line"
        )
    return cells


def _read_parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    with reading(path), open(path, "rb") as file:
        try:
            table = pyarrow.parquet.read_table(file)
            return Rows(table.to_pylist(), str(path), features=_features(table.schema))
        except pyarrow.ArrowException as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{path}: broken Parquet file ({reason}); write it again") from None


def _features(schema: Any) -> Mapping[str, Any] | None:
    """Reads the column types that `datasets` writes into the metadata of a Parquet file.

    Returns None if there are none, or if an incompatible version wrote them.
    """
    if b"huggingface" not in (schema.metadata or {}):
        return None
    from datasets import Features

    try:
        return Features.from_arrow_schema(schema)
    except (KeyError, TypeError, ValueError):
        return None
