"""Converts rows from Python to those of the data pipeline."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.files import SUFFIXES, read_file
from jaxprompt.data.sources.records import Record, from_rows, from_texts, with_examples
from jaxprompt.data.sources.splits import as_python, with_class_names
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError, brief

# Dicts, a `datasets.Dataset`, a pandas DataFrame, or the path of a file.
AnyRows = Iterable[Mapping[str, Any]] | str | Path | Any


def make_rows(data: AnyRows, split: str, task: Task) -> Rows:
    """Returns the rows of a split, with class names from the data set.

    Raises:
      InputError: if `data` cannot be read as rows.
    """
    return with_class_names(task, to_rows(data, split, task.columns))


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
        records = from_texts(texts, task.fields, "text")
    else:
        records = from_rows(to_rows(data, "rows", task.columns, "a list of texts, "))
    records = list(with_examples(task, records))
    for record in records:
        if record.error:
            raise InputError(record.error)
    return records
