"""Converts rows from Python to those of the data pipeline."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.files import SUFFIXES, read_file
from jaxprompt.data.sources.records import Record, from_rows, from_texts, with_examples
from jaxprompt.data.sources.splits import as_python, with_class_names
from jaxprompt.data.tasks.conversation import MESSAGES
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError, brief

# Dicts, a `datasets.Dataset`, a pandas DataFrame, or the path of a file.
AnyRows = Iterable[Mapping[str, Any]] | str | Path | Any


# Columns that are the text, and the label, of a task that is not given; the first one counts.
_TEXTS, _LABELS = ("text", "sentence", "message", "review", "content"), ("label", "labels")
_ANSWERS = ("label", "target", "answers", "number", "tags")  # fields of a task that name a column


def make_rows(data: AnyRows, split: str, task: Task) -> Rows:
    """Returns the rows of a split, with class names from the data set.

    Raises:
      InputError: if `data` cannot be read as rows.
    """
    return with_class_names(task, to_rows(data, split, task.columns))


def infer_task(data: AnyRows, overrides: Mapping[str, Any]) -> tuple[Rows, dict[str, Any]]:
    """Returns training rows, and their custom task from the names of their columns.

    The text is the column `text`, `sentence`, `message`, `review` or `content`, else the only
    column of strings besides the label. The label is the column `label` or `labels`, else the only
    column besides the text. A column `messages` of lists has conversations.

    Args:
      data: the training rows.
      overrides: config fields by name; the answer column among them is not inferred.

    Raises:
      InputError: if several columns could be the text, or the label.
    """
    rows = to_rows(data, "train", (_TEXTS[0], _LABELS[0]))
    row = rows[0] if len(rows) else {}
    fields = {name.removeprefix("task__"): value for name, value in overrides.items()}
    answers = [fields[name] for name in _ANSWERS if name in fields]
    has_messages = isinstance(row.get(MESSAGES), list | tuple) and not answers
    if "messages" in fields or has_messages:
        return rows, {"name": "custom", "fields": (), "messages": (MESSAGES,)}
    if "fields" in fields or not row:
        return rows, {"name": "custom", "fields": _TEXTS[:1]}
    names = answers or [name for name in _LABELS if name in row][:1]
    others = [name for name in row if name not in names]
    strings = [name for name in others if isinstance(row[name], str)]
    texts = [name for name in _TEXTS if name in others][:1] or strings
    names = names or [name for name in others if name not in texts]
    if len(texts) != 1 or len(names) != 1:
        raise InputError(
            f"it is not clear which columns are the text and the label of {brief(list(row))}; give "
            'them, e.g. task=jp.task("text", label="label")'
        )
    label = {} if answers else {"label": names[0]}
    return rows, {"name": "custom", "fields": texts, **label}


def to_rows(data: AnyRows, split: str, columns: Sequence[str] = (), texts: str = "") -> Rows:
    """Returns rows unchanged, class indices included.

    Args:
      data: the rows.
      split: name of the rows, for messages.
      columns: column names for files without a header.
      texts: put first in the message about valid types, if plain texts are allowed, too.

    Raises:
      InputError: if `data` cannot be read as rows.
    """
    if isinstance(data, Rows):
        return data
    # Types are recognised by their attributes, so that neither pandas nor datasets is imported.
    if isinstance(data, str | Path):
        return read_file(data, columns)
    if hasattr(data, "to_dicts"):  # polars
        return Rows(as_python(data.to_dicts()), split)
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas: a column is a Series
        names = list(data.columns)
        if not all(isinstance(name, str) and names.count(name) == 1 for name in names):
            raise InputError(
                f"{split}: the columns {brief(names)} of the DataFrame must be different strings; "
                "rename them, e.g. df.columns = ['text', 'label']"
            )
        return Rows(as_python(data.to_dict("records")), split)
    if hasattr(data, "features") and hasattr(data, "column_names"):
        if hasattr(data, "with_format"):
            data = data.with_format(None)  # in tensor and frame formats, cells are not strings
        dataset = data if hasattr(data, "__len__") else list(data)  # a streaming one has no length
        return Rows(dataset, split, features=data.features)
    rows = list(data) if isinstance(data, Iterable) and not isinstance(data, Mapping) else None
    if rows is None or not all(isinstance(row, Mapping) for row in rows):
        value = brief(data if rows is None else next(r for r in rows if not isinstance(r, Mapping)))
        raise InputError(
            f"{split}: {value} cannot be read as rows; give {texts}a list of dicts, a "
            "datasets.Dataset, a pandas DataFrame or the path of a file"
        )
    return Rows(as_python(rows), split)


def _as_list(texts: Any) -> list[Any]:
    """Lists texts from a list, a column of a DataFrame or data set, an array, or one text."""
    for convert in ("tolist", "to_list"):
        if hasattr(texts, convert) and not hasattr(texts, "columns"):
            return list(getattr(texts, convert)())
    is_many = isinstance(texts, Sequence) and not isinstance(texts, str)
    return list(texts) if is_many else [texts]


def make_records(data: AnyRows | Sequence[str], task: Task) -> list[Record]:
    """Reads texts or rows to predict; labels may be missing.

    Raises:
      InputError: for the first row that is not an example of the task.
    """
    records = list(with_examples(task, read_records(data, task.input_columns, task.columns)))
    for record in records:
        if record.error:
            raise InputError(record.error)
    return records


def read_records(
    data: AnyRows | Sequence[str], fields: Sequence[str], columns: Sequence[str] = ()
) -> list[Record]:
    """Reads texts or rows to predict as records without examples.

    Args:
      data: texts, for tasks with one field, or rows.
      fields: the fields of the task.
      columns: column names for files without a header.
    """
    # A lone string is a text here, not the path of a file.
    if isinstance(data, str) and data.endswith(SUFFIXES) and os.path.isfile(data):
        raise InputError(
            f"rows={brief(data)} would be read as a text, but it is a file; give Path({data!r}) "
            "for its rows"
        )
    if isinstance(data, Iterator):
        data = list(data)
    texts: list[Any] = _as_list(data)
    if any(isinstance(text, str) for text in texts):
        for index, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise InputError(
                    f"text {index}: {brief(text)} is not a string; replace or remove it"
                )
        return from_texts(texts, fields, "text")
    return from_rows(to_rows(data, "rows", columns, "a list of texts, "))


def as_conversations(
    rows: Any, fields: Collection[str]
) -> list[Sequence[Mapping[str, Any]]] | None:
    """Returns conversations, each a list of messages, None if `rows` are texts or rows of a task.

    A message is a dict with a role and a content, unless these are `fields` of the task; one
    conversation may be given alone.

    Raises:
      InputError: for a list among `rows` that is no conversation.
    """
    if not isinstance(rows, list | tuple) or not rows:
        return None
    if all(map(_is_message, rows)) and not {"role", "content"}.intersection(fields):
        return [rows]
    if not any(isinstance(row, list | tuple) for row in rows):
        return None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, list | tuple) or not row or not all(map(_is_message, row)):
            raise InputError(
                f"conversation {number}: {brief(row)} must be a list of messages, each a dict with "
                "role and content, both texts; correct or remove it"
            )
    return list(rows)


def _is_message(row: Any) -> bool:
    parts = (row.get("role"), row.get("content")) if isinstance(row, Mapping) else (None, None)
    return all(isinstance(part, str) for part in parts)
