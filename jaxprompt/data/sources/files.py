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
# The end of the header of SNLI's train.tsv in GLUE; rows with five annotators have label2 to label5
# between these two.
_SNLI_LABELS, _SNLI_MORE = ["label1", "gold_label"], 4
_QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a quoted cell, with quotes inside it doubled
_SEP = re.compile(r"sep=([,;\t])[,;]*\s*$", re.I)  # Excel's first line, the delimiter of cells
# Parquet has compression of its own.
SUFFIXES = (*FORMATS, *(kind + ".gz" for kind in FORMATS[:-1]))


def read_file(path: str | Path, columns: Sequence[str] = ()) -> Rows:
    """Reads one file; its format is detected from its name, which ends in one of SUFFIXES.

    Args:
      path: path of the file.
      columns: column names of a row that is a list in JSON, and of a CSV or TSV without a header.
        Without `predicate` among them, entities are read from CoNLL-2012, not roles.
    """
    path = user_path(path)
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if path.suffix == ".parquet":
        rows = _read_parquet(path)
    elif suffix == ".json":
        rows = _read_json(path, columns)
    elif suffix == ".tsv":
        rows = _read_tsv(path, columns)
    elif suffix == ".jsonl" or (suffix == ".txt" and _contains_json(path)):
        rows = _read_jsonl(path)
    elif suffix in conll.FORMATS:
        roles = not columns or "predicate" in columns
        tagged, numbers = conll.read_tagged_file(_decoded_lines(path), str(path), roles=roles)
        rows = Rows(tagged, str(path), numbers)
    elif suffix == ".csv":
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
def file_errors(path: Path) -> Iterator[None]:
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
def open_unpacked(path: Path) -> Iterator[io.BufferedIOBase]:
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
    with file_errors(path), open_unpacked(path) as file:
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


def _decoded_lines(path: Path) -> Iterator[str]:
    return (decode_line(line, number, path) for number, line in enumerate(raw_lines(path), 1))


def _contains_json(path: Path) -> bool:
    """Returns whether a text file begins with a JSON object, as SciBERT's and OpenNRE's .txt do."""
    first = next((line for line in _decoded_lines(path) if line.strip()), "")
    return re.match(r'\s*\{\s*"', first) is not None


def _read_jsonl(path: Path) -> Rows:
    rows, numbers, lines = [], array("q"), raw_lines(path)
    try:
        for number, line in enumerate(lines, 1):
            if text := decode_line(line, number, path).strip():
                rows.append(parse_row(text, f"{path}:{number}"))
                numbers.append(number)
    except InputError:
        # A damaged .gz has broken lines; reading it to its end raises the error of gzip instead.
        for _ in lines:
            pass
        raise
    return Rows(rows, str(path), numbers)


def _read_json(path: Path, columns: Sequence[str]) -> Rows:
    text = "".join(_decoded_lines(path))
    if _has_json_lines(text):
        return _read_jsonl(path)
    rows = _parse_json(text, str(path))
    if isinstance(rows, dict):  # SQuAD and its kin: {"version": ..., "data": [...]}
        rows = rows.get("data")
    if not isinstance(rows, list):
        raise InputError(
            f'{path}: must be a list of objects, or an object whose "data" is such a list; name a '
            "file with one object per line .jsonl"
        )
    for i, row in enumerate(rows):
        if isinstance(row, list) and len(row) == len(columns) > 0:
            rows[i] = dict(zip(columns, row, strict=True))
    return Rows([_check_row(row, f"{path}: row {i}") for i, row in enumerate(rows, 1)], str(path))


def _has_json_lines(text: str) -> bool:
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
    return _check_row(_parse_json(text, where), where)


def _parse_json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(f"{where}: broken JSON ({error}); fix or remove this line") from None


def _check_row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        advice = (
            "; a file that is one list of rows must be named .json"
            if isinstance(value, list)
            else ""
        )
        raise InputError(
            f"{where}: a row must be an object {{column: value}}, got {value!r:.40}{advice}"
        )
    return value


def _read_csv(path: Path, columns: Sequence[str]) -> Rows:
    """Reads CSV with double quotes, its cells separated by commas, semicolons or tabs."""
    lines = list(_decoded_lines(path))
    separator = _SEP.match(lines[0]) if lines else None
    if separator:
        lines[0] = "\n"
    # Lines keep their ends, which a quoted cell may contain.
    first = next((line for line in lines if line.strip()), "")
    delimiter = separator[1] if separator else _delimiter(first)
    return _read_table(
        path,
        lines,
        _names_if_headerless(_cells(first, delimiter), columns),
        delimiter=delimiter,
        strict=True,
    )


def _delimiter(line: str) -> str:
    """Finds the delimiter: a comma, or if the line has none, the one that gives most cells."""
    counts = {delimiter: len(_cells(line, delimiter)) for delimiter in ",;\t"}
    return "," if counts[","] > 1 else max(counts, key=lambda delimiter: counts[delimiter])


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:  # reported when the rows are read
        return []


def _names_if_headerless(cells: Sequence[str], columns: Sequence[str]) -> Sequence[str] | None:
    """Returns `columns` if the first row holds values: it names none of them, and has a number."""
    is_row = len(cells) == len(columns) and not set(cells) & set(columns)
    return columns if is_row and any(map(str.isdecimal, cells)) else None


def _read_tsv(path: Path, columns: Sequence[str]) -> Rows:
    """Reads TSV with or without double quotes, and without a header if its first row is data.

    GLUE's files do not quote, so a quote may begin a cell and never end; pandas and spreadsheets
    quote cells that contain a tab, a quote or a line end.
    """
    lines = list(_decoded_lines(path))
    cells = next((line for line in lines if line.strip()), "").rstrip("\r\n").split("\t")
    header = _names_if_headerless(cells, columns)

    def read_quoted() -> Rows:
        return _read_table(path, lines, header, delimiter="\t", strict=True)

    # Without quoting first, which never fails on a quote and shows the cells as written.
    try:
        rows = _read_table(path, lines, header, delimiter="\t", quoting=csv.QUOTE_NONE)
    except InputError as error:
        try:
            return read_quoted()
        except InputError:
            raise error from None
    return read_quoted() if _is_quoted(rows) else rows


def _is_quoted(rows: Sequence[dict[str, str]]) -> bool:
    """Returns whether a file quotes its cells.

    It does if all raw cells that begin with a quote are well-formed, and one of these has a doubled
    quote, or the whole header is quoted.
    """
    if not len(rows):
        return False
    cells = [*rows[0], *(cell for row in rows for cell in row.values())]
    opened = [cell for cell in cells if cell.startswith('"')]
    if not opened or not all(map(_QUOTED.fullmatch, opened)):
        return False
    return any('""' in cell[1:-1] for cell in opened) or all(map(_QUOTED.fullmatch, rows[0]))


def _read_table(
    path: Path, lines: Sequence[str], header: Sequence[str] | None = None, **style: Any
) -> Rows:
    csv.field_size_limit(1 << 30)  # some documents are longer than the default of 128 KiB
    reader = csv.reader(lines, **style)
    rows, numbers, first_line, snli_length = [], array("q"), 1, -1
    try:
        for cells in reader:
            if not cells:
                pass
            elif header is None:
                header = _check_header(cells, path)
                snli_length = len(header) + _SNLI_MORE if header[-2:] == _SNLI_LABELS else -1
            elif len(cells) == snli_length:
                rows.append(dict(zip(header, [*cells[: len(header) - 1], cells[-1]], strict=True)))
                numbers.append(first_line)
            elif len(cells) != len(header):
                delimiter_name = {",": "comma", ";": "semicolon", "\t": "tab"}[style["delimiter"]]
                advice = (
                    f"fix the row, and put cells that contain a {delimiter_name} in double quotes"
                )
                # A few rows of GLUE's QQP end early.
                if len(cells) < len(header) and "quoting" in style and path.suffix == ".tsv":
                    command = (
                        f"awk -F'\\t' 'NF == {len(header)}' {shlex.quote(str(path))} > whole.tsv"
                    )
                    advice = f"fix the row, or remove all such rows: {command}"
                raise InputError(
                    f"{path}:{first_line}: {len(cells)} cells, but the header has {len(header)} "
                    f"({', '.join(header)}); {advice}"
                )
            else:
                rows.append(dict(zip(header, cells, strict=True)))
                numbers.append(first_line)
            # A quoted cell may span lines: messages name the line where its row begins.
            first_line = reader.line_num + 1
    except csv.Error as error:
        advice = "fix its quotes"
        if "\r" in lines[first_line - 1].rstrip("\r\n"):
            name = shlex.quote(path.name)
            advice = (
                "quote the cell with the carriage return, or replace that by a space: "
                f"sed 's/\\r\\(.\\)/ \\1/g' {name}"
            )
            if len(lines) == 1:  # as old Macs end lines
                advice = f"end its lines with a line feed, e.g. by tr '\\r' '\\n' < {name}"
        raise InputError(f"{path}:{first_line}: broken row ({error}); {advice}") from None
    return Rows(rows, str(path), numbers)


def _check_header(cells: list[str], path: Path) -> list[str]:
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

    with file_errors(path), open(path, "rb") as file:
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
