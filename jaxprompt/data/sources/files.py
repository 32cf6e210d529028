"""Reads the rows of one local file: JSON lines, JSON, CSV, TSV, Parquet, or tagged sentences.

Every problem with a file is an InputError with the file and, if there is one, the line.
"""

import csv
import gzip
import io
import itertools
import re
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from jaxprompt.data.rows import Rows
from jaxprompt.data.sources import conll
from jaxprompt.errors import InputError, first_line
from jaxprompt.files import open_regular, parse_json, user_path, utf8_advice

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

FORMATS = (".jsonl", ".json", ".csv", ".tsv", *conll.FORMATS, ".parquet")
# Parquet has compression of its own.
SUFFIXES = (*FORMATS, *(kind + ".gz" for kind in FORMATS[:-1]))
# The end of the header of SNLI's train.tsv in GLUE; rows with five annotators have label2 to label5
# between these two.
_SNLI_LABELS, _SNLI_MORE = ["label1", "gold_label"], 4
_QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a quoted cell, with quotes inside it doubled
# The rows of a table, each after the line where it begins, or after its number in the file.
NumberedRows: TypeAlias = Iterator[tuple[int, dict[str, Any]]]
_SEP = re.compile(r"sep=([,;\t])[,;]*\s*$", re.I)  # Excel's first line, the delimiter of cells
# A file may unpack to this many bytes, or to this many times its size if that is more. Among 108
# published data sets in gzip the largest ratio is 41; gzip reaches 1,032, and Parquet any number.
_MAX_UNPACKED, _MAX_RATIO = 2**26, 100
_ROW_BYTES = 8  # counted for each row of Parquet, as its values may take nothing
_BLOCK_BYTES = 2**20  # decompressed at once
_BATCH_ROWS = 256  # read from Parquet at once: a value may be long, and its repetitions tiny


def read_file(path: str | Path, columns: Sequence[str] = ()) -> Rows:
    """Reads one file; its format is detected from its name, which ends in one of SUFFIXES.

    Args:
      path: path of the file.
      columns: column names of a row that is a list in JSON, and of a CSV or TSV without a header.
        Without `predicate` among them, entities are read from CoNLL-2012, not roles.
    """
    path = user_path(path)
    if not path.name.endswith(SUFFIXES):
        raise InputError(
            f"{path}: unknown file format; the name must end in {', '.join(FORMATS)}, followed by "
            ".gz if a text file is compressed; give a folder as data.source"
        )
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix == ".parquet":
        rows = _read_parquet(path)
    elif suffix == ".jsonl":
        rows = _read_jsonl(path, _decoded_lines(path))
    elif suffix in _TABLES:
        numbered = list(_TABLES[suffix](path, columns))
        numbers = array("q", (number for number, _ in numbered))
        rows = Rows([row for _, row in numbered], str(path), numbers)
    else:
        lines = list(_decoded_lines(path))
        if suffix == ".json":
            rows = _read_json(path, lines, columns)
        elif suffix == ".txt" and _contains_json(lines):
            rows = _read_jsonl(path, lines)
        else:
            roles = not columns or "predicate" in columns
            rows = conll.read_tagged_file(lines, str(path), roles=roles)
    if not len(rows):
        raise InputError(f"{path}: the file has no rows")
    return rows


def stream_file(
    path: Path, columns: Sequence[str] = ()
) -> tuple[Iterator[tuple[str, dict[str, Any]]], Mapping[str, Any] | None]:
    """Reads a file as `read_file` does, but CSV, TSV and Parquet one row after the other.

    Returns:
      Each row, after where it was read from ("path:line"); the types of the columns, see `Rows`.
    """
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix == ".parquet":
        with _open_parquet(path) as table:
            features = _features(table.schema_arrow)
        numbered = _parquet_rows(path)
    elif suffix in _TABLES:
        numbered, features = _TABLES[suffix](path, columns), None
    else:
        rows = read_file(path, columns)
        return ((rows.origin(i), row) for i, row in enumerate(rows)), rows.features
    return ((f"{path}:{number}", row) for number, row in numbered), features


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turns exceptions raised while `path` is read into an InputError."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise InputError(
            f"{path}: is a folder, not a file; name a file in it, or give it as data.source"
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: broken gzip file ({error}); copy or compress it again") from None
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or first_line(error)})"
        ) from None


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """Opens a file, decompressed if its name ends in .gz; see `_check_unpacked`."""
    with open_regular(path) as file:
        if path.suffix == ".gz":
            unpacked, size = gzip.GzipFile(fileobj=file), 0
            # In a pass of its own, because parsing the rows of a refused file may take minutes.
            while block := unpacked.read(_BLOCK_BYTES):
                size += len(block)
                _check_unpacked(path, size)
            unpacked.seek(0)
            file = cast(BinaryIO, io.BufferedReader(unpacked, _BLOCK_BYTES))
        yield file


def _check_unpacked(path: Path, size: int) -> None:
    """Raises InputError if a file unpacks to so many bytes that it would fill the memory."""
    limit = max(_MAX_UNPACKED, _MAX_RATIO * path.stat().st_size)
    if size > limit:
        raise InputError(
            f"{path}: unpacks to over {limit:,} bytes, {_MAX_RATIO} times its size or more; check "
            "it, and if it is right, give it uncompressed as .jsonl"
        )


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


def _contains_json(lines: Iterable[str]) -> bool:
    """Returns whether a text file begins with a JSON object, as SciBERT's and OpenNRE's .txt do."""
    first = next((line for line in lines if line.strip()), "")
    return re.match(r'\s*\{\s*"', first) is not None


def _read_jsonl(path: Path, lines: Iterable[str]) -> Rows:
    rows, numbers = [], array("q")
    for number, line in enumerate(lines, 1):
        if text := line.strip():
            rows.append(parse_row(text, f"{path}:{number}"))
            numbers.append(number)
    return Rows(rows, str(path), numbers)


def _read_json(path: Path, lines: Sequence[str], columns: Sequence[str]) -> Rows:
    text = "".join(lines)
    try:
        rows = parse_json(text)
    except ValueError as error:
        if "Extra data" in str(error) and text.lstrip().startswith("{"):
            return _read_jsonl(path, lines)  # CLUE's .json files have one object per line
        raise InputError(f"{path}: broken JSON ({error}); fix the file") from None
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


def parse_row(text: str, where: str) -> dict[str, Any]:
    """Parses one row of JSON; `where` ("file:line") starts the message of an InputError."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise InputError(f"{where}: broken JSON ({error}); fix or remove this line") from None
    return _check_row(value, where)


def _check_row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: a row must be an object {{column: value}}, got {value!r:.40}")
    return value


def _csv_rows(path: Path, columns: Sequence[str]) -> NumberedRows:
    """Reads CSV, separated as its `sep=` line says, or by the first of , ; and tab in line 1."""
    lines = _decoded_lines(path)
    leading = []  # up to the first line that is not blank
    for line in lines:
        leading.append(line)
        if line.strip():
            break
    first = leading[-1] if leading else ""
    if separator := _SEP.match(first):
        leading[-1] = "\n"
        delimiter = separator[1]
    else:
        delimiter = next((mark for mark in ",;\t" if mark in first), ",")
    return _named_rows(path, itertools.chain(leading, lines), columns, delimiter=delimiter)


def _tsv_rows(path: Path, columns: Sequence[str]) -> NumberedRows:
    """Reads TSV with or without double quotes.

    GLUE's files do not quote, so a quote may begin a cell and never end; pandas and spreadsheets
    quote cells that contain a tab, a quote or a line end.
    """

    def rows(**style: Any) -> NumberedRows:
        return _named_rows(path, _decoded_lines(path), columns, delimiter="\t", **style)

    # Without quoting first, which never fails on a quote and shows the cells as written.
    try:
        is_quoted = _is_quoted(rows(quoting=csv.QUOTE_NONE))
    except InputError:
        with suppress(InputError):
            deque(rows(), maxlen=0)  # reads all rows
            return rows()
        raise
    return rows() if is_quoted else rows(quoting=csv.QUOTE_NONE)


def _is_quoted(rows: NumberedRows) -> bool:
    """Returns whether a file quotes its cells.

    It does if all raw cells that begin with a quote are well-formed, and one of these has a doubled
    quote, or the whole header is quoted.
    """
    is_well_formed = has_doubled = True
    for index, (_, row) in enumerate(rows):
        if index == 0:  # with the header
            has_doubled = all(cell.startswith('"') for cell in row)
        for cell in (*(row if index == 0 else ()), *row.values()):
            if cell.startswith('"'):
                is_well_formed = is_well_formed and _QUOTED.fullmatch(cell) is not None
                has_doubled = has_doubled or '""' in cell[1:-1]
    return is_well_formed and has_doubled


def _named_rows(
    path: Path, lines: Iterable[str], columns: Sequence[str], **style: Any
) -> NumberedRows:
    """Reads CSV or TSV; there is no header if the first row has a number and no column name.

    The csv module, because pyarrow.csv and `datasets` do not say on which line a row begins, and
    refuse the rows of SNLI.
    """
    csv.field_size_limit(1 << 30)  # some documents are longer than the default of 128 KiB
    table = _table_rows(path, lines, **style)
    number, header = next(table, (1, []))
    is_row = len(header) == len(columns) and not set(header) & set(columns)
    if is_row and any(map(str.isdecimal, header)):
        table = itertools.chain([(number, header)], table)
        header = list(columns)
    # The first name may be empty: pandas writes its index that way.
    elif "" in header[1:] or len(set(header)) < len(header):
        raise InputError(
            f"{path}:{number}: the header must name every column once, got: "
            f"{', '.join(header)}; fix this line"
        )
    for number, cells in table:
        if header[-2:] == _SNLI_LABELS and len(cells) == len(header) + _SNLI_MORE:
            del cells[len(header) - 1 : -1]
        if len(cells) != len(header):
            raise InputError(
                f"{path}:{number}: {len(cells)} cells, but the header has {len(header)} "
                f"({', '.join(header)}); fix or remove the row, and put cells that contain the "
                "separator in double quotes"
            )
        yield number, dict(zip(header, cells, strict=True))


_TABLES = {".csv": _csv_rows, ".tsv": _tsv_rows}


def _table_rows(path: Path, lines: Iterable[str], **style: Any) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of the line where each row begins, and its cells."""
    reader = csv.reader(lines, strict=True, **style)
    first_line = 1
    try:
        for cells in reader:
            if cells:
                yield first_line, cells
            first_line = reader.line_num + 1  # a quoted cell may span lines
    except csv.Error as error:
        raise InputError(
            f"{path}:{first_line}: broken row ({error}); fix its quotes and line ends"
        ) from None


def _read_parquet(path: Path) -> Rows:
    with _open_parquet(path) as table:
        size, rows = _ROW_BYTES * table.metadata.num_rows, []
        _check_unpacked(path, size)
        for batch in table.iter_batches(_BATCH_ROWS):
            size += sum(map(_num_bytes, batch.columns))
            _check_unpacked(path, size)
            rows += batch.to_pylist()
        return Rows(rows, str(path), features=_features(table.schema_arrow))


def _parquet_rows(path: Path) -> NumberedRows:
    """Reads Parquet a batch at a time."""
    with _open_parquet(path) as table:
        batches = (batch.to_pylist() for batch in table.iter_batches(_BATCH_ROWS))
        yield from enumerate(itertools.chain.from_iterable(batches), 1)


@contextmanager
def _open_parquet(path: Path) -> Iterator["ParquetFile"]:
    """Opens a Parquet file, and turns the exceptions of reading it into an InputError."""
    import pyarrow
    import pyarrow.parquet

    with file_errors(path), open_regular(path) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file)
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                raise InputError(
                    f"{path}: must name every column once, got: {', '.join(names)}; write it again"
                )
            yield table
        except InputError:
            raise
        # A ValueError for text that is not UTF-8, and for a date that Python lacks.
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{path}: broken Parquet file ({reason}); write it again") from None


def _num_bytes(column: Any) -> int:
    """Returns the size of a column whose values are all written out."""
    return (column.dictionary_decode() if hasattr(column, "dictionary") else column).nbytes


def _features(schema: Any) -> Mapping[str, Any] | None:
    """Reads the column types that `datasets` writes into the metadata of a Parquet file.

    Returns None if there are none, or if an incompatible version wrote them.
    """
    if b"huggingface" not in (schema.metadata or {}):
        return None
    from datasets import Features

    try:
        return Features.from_arrow_schema(schema)
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
