"""Records of the input and output of predictions: one per line or row, in order."""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.files import (
    decode_line,
    file_errors,
    parse_row,
    raw_lines,
    stream_file,
)
from jaxprompt.data.sources.splits import feature_names, label_namer
from jaxprompt.data.tasks.readers.candidates import example_rows_or_errors
from jaxprompt.data.tasks.readers.reading import has_label, read_example
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.errors import InputError, brief
from jaxprompt.files import json_line, user_path


class Record(NamedTuple):
    """One line or row of the input: a row, an error, or a blank line."""

    origin: str  # "file:line"
    row: dict[str, Any] | None = None
    error: str = ""  # why there is no example
    example: Example | None = None
    features: Mapping[str, Any] | None = None  # types of the columns, see `Rows`
    prompt: int = 0  # number of the prompt that answers it, among several
    confidence: float | None = None  # of the router that chose the prompt, or none


def from_texts(texts: Sequence[str], fields: Sequence[str], name: str) -> list[Record]:
    """Makes records of texts for a task with one field; messages call a text `name`."""
    return [
        Record(f"{name} {number}", _field_row(text, fields, name))
        for number, text in enumerate(texts, 1)
    ]


def from_file(path: str, columns: Sequence[str] = ()) -> Iterator[Record]:
    """Reads a file of any format. A broken or blank line of a JSONL file is a record too.

    JSONL, CSV, TSV and Parquet files are read as the records are requested.

    Args:
      path: path of the file. A pipe, such as <(zcat rows.gz), has JSON lines.
      columns: names for rows that have none, see `read_file`.
    """
    where = user_path(path)
    with file_errors(where):
        is_pipe = where.suffix in ("", ".jsonl") and where.is_fifo()
    if is_pipe:
        return _from_lines(_pipe_lines(where), str(where), ())
    if where.name.removesuffix(".gz").endswith(".jsonl"):
        return _from_lines(raw_lines(where), str(where), ())
    rows, features = stream_file(where, columns)
    return (Record(origin, dict(row), features=features) for origin, row in rows)


def _pipe_lines(path: Path) -> Iterator[bytes]:
    with file_errors(path), open(path, "rb") as file:
        yield from file


def from_rows(rows: Rows) -> list[Record]:
    """Makes one record per row."""
    return [Record(rows.origin(i), dict(row), features=rows.features) for i, row in enumerate(rows)]


def from_stdin(fields: Sequence[str]) -> Iterator[Record]:
    """Reads lines of JSON, or plain lines if the task has one field, as records are requested."""
    if sys.stdin is None:
        raise InputError("stdin is closed; use --input=FILE")
    # Bytes if possible, so that a line that is not UTF-8 is an error of its record.
    with file_errors(Path("stdin")):
        yield from _from_lines(getattr(sys.stdin, "buffer", sys.stdin), "stdin", fields)


def _from_lines(
    lines: Iterable[bytes | str], source: str, fields: Sequence[str]
) -> Iterator[Record]:
    """Reads lines of JSON; with `fields`, a line that is not an object is a text."""
    for number, line in enumerate(lines, 1):
        origin = f"{source}:{number}"
        if fields and number == 1:
            _check_no_header(line, fields, origin)
        try:
            text = line if isinstance(line, str) else decode_line(line, number, source)
            text = text.strip()
            if not text:
                yield Record(origin)
            elif fields and text[0] != "{":
                yield Record(origin, _field_row(text, fields, "a plain line"))
            else:
                yield Record(origin, parse_row(text, origin))
        except InputError as error:
            # A record for a broken line too, because the output has a line for each input line.
            yield Record(origin, error=str(error))


def _check_no_header(line: bytes | str, fields: Sequence[str], where: str) -> None:
    """Raises InputError for the header of a table, whose rows would be read as texts."""
    text = (line if isinstance(line, str) else line.decode("utf-8-sig", "replace")).strip()
    cells = [cell.strip().strip('"') for cell in re.split("[,;\t]", text)]
    if not text.startswith("{") and set(fields) & set(cells):
        raise InputError(
            f"{where}: {brief(text)} is the header of a table with the field {fields[0]!r}, but "
            "stdin takes JSON lines, or one text per line; write the table to a .csv or .tsv file "
            "and use --input=FILE"
        )


def _field_row(text: str, fields: Sequence[str], source: str) -> dict[str, str]:
    if len(fields) != 1:
        raise InputError(
            f"the task has {len(fields)} fields ({', '.join(fields)}), which {source} cannot "
            "separate; use JSON lines"
        )
    return {fields[0]: text}


def with_examples(task: Task, records: Iterable[Record]) -> Iterator[Record]:
    """Reads the example of each row; its label is unknown if the row has no label of the task.

    A row with several examples, such as candidates, becomes one record per example, each with its
    error if it has one.
    """
    for record in records:
        if record.row is None:
            yield record
            continue
        for row, error in example_rows_or_errors(task, record.row, record.origin):
            example = None
            try:
                example = None if error else _read(task, record, row)
            except InputError as unreadable:
                error = str(unreadable)
            yield record._replace(row=row, error=error, example=example)


def _read(task: Task, record: Record, row: dict[str, Any]) -> Example:
    # The data set may number its classes in another order than the task.
    convert = label_namer(task, feature_names(record.features, task))
    named = convert(row) if convert else row
    return read_example(task, named, record.origin, need_label=False, need_place=False)


def check_columns(records: Iterable[Record], names: Sequence[str], prefix: str) -> Iterator[Record]:
    """Yields the records; raises InputError if the output would overwrite a column of one."""
    for record in records:
        for name in names:
            if record.row is not None and prefix + name in record.row:
                raise InputError(
                    f"{record.origin}: the input already has a column {prefix + name!r}, which the "
                    f"output would overwrite; use --prefix=P to name the output columns P{name} "
                    "etc."
                )
        yield record


class UnknownLabels:
    """Counts the labels that are unknown to a task."""

    def __init__(self, task: Task):
        """Starts at 0."""
        self._task, self._examples, self._unknown = task, 0, 0
        self._first: tuple[str, Any] = "", None  # where the first is, and what

    def add(self, record: Record) -> None:
        """Counts the label of a record with an example."""
        task, row, example = self._task, record.row, record.example
        if task.kind not in ("tags", "classes") or row is None or example is None:
            return
        self._examples += 1
        if example.label < 0 and not example.tags and has_label(task, row):
            if not self._unknown:
                self._first = record.origin, row[task.tags or task.label]
            self._unknown += 1

    def messages(self) -> Iterator[str]:
        """Yields a message with the number of unknown labels, if any, and the first of them."""
        if self._unknown:
            origin, label = self._first
            noun = "tags" if self._task.tags else "labels"
            yield (
                f"{noun} unknown to task {self._task.name}: {self._unknown} of {self._examples} "
                f"examples, the first {label!r:.40} at {origin}; they are treated as unlabelled"
            )


def output_lines(
    records: Iterable[Record], answers: Iterable[Mapping[str, Any]], prefix: str
) -> Iterator[str]:
    """Yields one line of JSON per record: its row followed by the answer, or its error.

    Args:
      records: the records, in order.
      answers: the answers of the records with an example, in order.
      prefix: put before the names of the output columns.

    Returns:
      The lines; a blank line of the input stays blank.
    """
    answers = iter(answers)
    for record in records:
        if record.row is None and not record.error:
            yield "\n"
            continue
        answer = {"error": record.error} if record.error else next(answers)
        output = {prefix + name: value for name, value in answer.items()}
        row = {name: _json_value(value) for name, value in (record.row or {}).items()}
        try:
            # Values that JSON lacks, such as Parquet's dates, become strings.
            line = json_line({**row, **output})
        except ValueError as error:
            raise InputError(
                f"{record.origin}: the scores are not finite; the prompt's values are too large "
                "for this backbone: try --dtype=float32, and train again with a lower optim.lr"
            ) from error
        yield line + "\n"


def _json_value(value: Any) -> Any:
    """Converts a cell to a JSON value; NaN, an empty cell of a table, becomes null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _json_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
