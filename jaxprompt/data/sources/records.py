"""Records in and out of a prediction: one for each line or row of the input, in its place."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.files import decode_line, parse_row, raw_lines, read_file, reading
from jaxprompt.data.sources.splits import name_labels, names_of
from jaxprompt.data.tasks.readers.candidates import readable_rows
from jaxprompt.data.tasks.readers.reading import has_label, read_example
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.errors import InputError
from jaxprompt.files import user_path


class Record(NamedTuple):
    """One line or row of the input. It holds a row, or an error, or it is a blank line."""

    origin: str  # "file:line"
    row: dict[str, Any] | None = None
    error: str = ""  # why it is not an example
    example: Example | None = None
    features: Mapping[str, Any] | None = None  # kinds of the columns, see `Rows`


def from_texts(texts: Sequence[str], fields: Sequence[str], name: str) -> list[Record]:
    """Makes records of texts that are the one field of a task each; messages call one `name`."""
    return [
        Record(f"{name} {number}", _one_field(text, fields, name))
        for number, text in enumerate(texts, 1)
    ]


def from_file(path: str, columns: Sequence[str] = ()) -> list[Record]:
    """Reads a file of any format. A broken or blank line of a JSONL file is a record too.

    `columns` are those of rows without names, see `read_file`.
    """
    where = user_path(path)
    if where.name.removesuffix(".gz").endswith(".jsonl"):
        return list(_from_lines(raw_lines(where), str(where), ()))
    return from_rows(read_file(where, columns))


def from_rows(rows: Rows) -> list[Record]:
    """Makes a record of each row."""
    return [Record(rows.origin(i), dict(row), features=rows.features) for i, row in enumerate(rows)]


def from_stdin(fields: Sequence[str]) -> list[Record]:
    """Reads lines of JSON, or plain ones that are the one field of the task."""
    if sys.stdin is None:
        raise InputError("stdin is closed; give --input=FILE")
    # Bytes where there are any: a line that is not UTF-8 then is an error of its own record.
    with reading(Path("stdin")):
        return list(_from_lines(getattr(sys.stdin, "buffer", sys.stdin), "stdin", fields))


def _from_lines(lines: Iterable[bytes | str], name: str, fields: Sequence[str]) -> Iterator[Record]:
    """Reads lines of JSON; with `fields` a line that is no object is a text."""
    for number, line in enumerate(lines, 1):
        origin = f"{name}:{number}"
        try:
            text = line if isinstance(line, str) else decode_line(line, number, name)
            text = text.strip()
            if not text:
                yield Record(origin)
            elif fields and text[0] != "{":
                yield Record(origin, _one_field(text, fields, "a plain line"))
            else:
                yield Record(origin, parse_row(text, origin))
        except InputError as error:
            # A broken line keeps its place: outputs have a line for each line of the input.
            yield Record(origin, error=str(error))


def _one_field(text: str, fields: Sequence[str], source: str) -> dict[str, str]:
    if len(fields) != 1:
        raise InputError(
            f"the task has {len(fields)} fields, {', '.join(fields)}: {source} cannot tell them "
            "apart; give JSON lines"
        )
    return {fields[0]: text}


def with_examples(task: Task, records: Iterable[Record]) -> list[Record]:
    """Reads the example of each row, its label unknown where it has none that the task knows.

    A row that holds several examples, such as candidates, becomes a record for each of them: what
    is wrong with one of them is said in its own.
    """
    found = []
    for record in records:
        if record.row is None:
            found.append(record)
            continue
        for row, error in readable_rows(task, record.row, record.origin):
            found.append(_with_example(task, record._replace(row=row, error=error), row))
    return found


def _with_example(task: Task, record: Record, row: dict[str, Any]) -> Record:
    if record.error:
        return record
    # Of a data set with names for its numbers, which may be of another order than the task's.
    convert = name_labels(task, names_of(record.features, task))
    named = convert(row) if convert else row
    try:
        example = read_example(task, named, record.origin, need_label=False, need_place=False)
    except InputError as error:
        return record._replace(error=str(error))
    return record._replace(example=example)


def check_columns(records: Iterable[Record], names: Sequence[str], prefix: str) -> None:
    """Raises InputError where a row has a column that is to be written: it would be lost."""
    for record in records:
        for name in names:
            if record.row is not None and prefix + name in record.row:
                raise InputError(
                    f"{record.origin}: the input has a column {prefix + name!r}, and so has the "
                    f"output; --prefix=P names the output's own columns P{name} and so on"
                )


def tell_unknown(task: Task, records: Iterable[Record]) -> list[str]:
    """Says how many examples have a label that the task does not know, and the first of them."""
    read = [
        (record.origin, record.row, record.example)
        for record in records
        if record.row is not None and record.example is not None
    ]
    if task.kind == "tags":
        places = [at for at, row, example in read if not example.tags and has_label(task, row)]
        if not places:
            return []
        count = f"tags unknown to task {task.name}: in {len(places)} of {len(read)}"
        return [f"{count}, the first at {places[0]}; these count as without tags"]
    if task.kind != "classes":
        return []
    odd = [
        (at, row[task.label])
        for at, row, example in read
        if example.label < 0 and has_label(task, row)
    ]
    if not odd:
        return []
    origin, label = odd[0]
    return [
        f"labels unknown to task {task.name}: {len(odd)} of {len(read)}, the first "
        f"{label!r:.40} at {origin}; these count as without a label"
    ]


def to_lines(
    records: Iterable[Record], answers: Iterable[Mapping[str, Any]], prefix: str
) -> Iterator[str]:
    """Writes a line of JSON for each record: its row with the answer behind it, or its error.

    `answers` are those of the records with an example, in order. A blank line stays one.
    """
    answers = iter(answers)
    for record in records:
        if record.row is None and not record.error:
            yield "\n"
            continue
        own = {"error": record.error} if record.error else next(answers)
        named = {prefix + name: value for name, value in own.items()}
        row = {name: _plain(value) for name, value in (record.row or {}).items()}
        try:
            yield _dump({**row, **named}) + "\n"
        except ValueError as error:
            raise InputError(
                f"{record.origin}: the scores are not finite; the prompt's numbers are too large "
                "for this backbone: try --dtype=float32, and train again with a lower optim.lr"
            ) from error
    if next(answers, None) is not None:  # each row from there on would have that of another
        raise RuntimeError("there are more answers than records with an example")


def _plain(value: Any) -> Any:
    """Gives a cell as JSON has it: an empty number of a table, NaN, is null wherever it stands."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _dump(row: Mapping[str, Any]) -> str:
    """Writes an object as JSON; what JSON has no form for, as the dates of Parquet, is a text.

    Raises ValueError for NaN and the infinities.
    """
    text = json.dumps(row, ensure_ascii=False, default=str, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character, which only an escape can write
        return json.dumps(row, default=str, allow_nan=False)
    return text
