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


def make_rows(given: AnyRows, split: str, task: Task) -> Rows:
    """Returns the rows of a split, with class names from the data set.

    Raises:
      InputError: if `given` cannot be read as rows.
    """
    return with_class_names(task, read_rows(given, split, task.columns))


def read_rows(given: AnyRows, split: str, columns: Sequence[str] = (), texts: str = "") -> Rows:
    """Returns rows unchanged, class indices included.

    Args:
      given: the rows.
      split: name of the rows, for messages.
      columns: column names for files without a header.
      texts: put first in the message about valid types, if plain texts are allowed, too.

    Raises:
      InputError: if `given` cannot be read as rows.
    """
    # Types are recognised by their attributes, so that neither pandas nor datasets is imported.
    if isinstance(given, str | Path):
        return read_file(given, columns)
    if hasattr(given, "to_dicts"):  # polars
        return Rows(as_python(given.to_dicts()), split)
    if hasattr(given, "to_dict") and hasattr(given, "columns"):  # pandas: a column is a Series
        odd = next((name for name in given.columns if not isinstance(name, str)), None)
        if odd is not None:
            raise InputError(
                f"{split}: the DataFrame has the column name {odd!r}, which is not a string; "
                "rename its columns, e.g. df.columns = ['text', 'label']"
            )
        if not given.columns.is_unique:
            twice = given.columns[given.columns.duplicated()][0]
            raise InputError(
                f"{split}: the DataFrame has the column {twice!r} twice; rename or drop one"
            )
        return Rows(as_python(given.to_dict("records")), split)
    if hasattr(given, "features") and hasattr(given, "column_names"):
        if hasattr(given, "with_format"):
            given = given.with_format(None)  # in tensor and frame formats, cells are not strings
        data = given if hasattr(given, "__len__") else list(given)  # a streaming one has no length
        return Rows(data, split, features=given.features)
    rows = list(given) if isinstance(given, Iterable) and not isinstance(given, Mapping) else None
    if rows is None or not all(isinstance(row, Mapping) for row in rows):
        odd = brief(given if rows is None else next(r for r in rows if not isinstance(r, Mapping)))
        raise InputError(
            f"{split}: {odd} cannot be read as rows; give {texts}a list of dicts, a "
            "datasets.Dataset, a pandas DataFrame or the path of a file"
        )
    return Rows(as_python(rows), split)


def _as_list(given: Any) -> list[Any]:
    """Lists texts from a list, a column of a DataFrame or data set, an array, or one text."""
    for convert in ("tolist", "to_list"):
        if hasattr(given, convert) and not hasattr(given, "columns"):
            return list(getattr(given, convert)())
    is_many = isinstance(given, Sequence) and not isinstance(given, str)
    return list(given) if is_many else [given]


def make_records(given: AnyRows | Sequence[str], task: Task) -> list[Record]:
    """Reads texts or rows to predict; labels may be missing.

    Raises:
      InputError: for the first row that is not an example of the task.
    """
    # A lone string is a text here, not the path of a file.
    if isinstance(given, str) and given.endswith(SUFFIXES) and os.path.isfile(given):
        raise InputError(
            f"rows={brief(given)} would be read as a text, but it is a file; give Path({given!r}) "
            "for its rows"
        )
    if isinstance(given, Iterator):
        given = list(given)
    texts: list[Any] = _as_list(given)
    if any(isinstance(text, str) for text in texts):
        for number, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise InputError(
                    f"text {number}: {brief(text)} is not a string; replace or remove it"
                )
        records = from_texts(texts, task.fields, "text")
    else:
        records = from_rows(read_rows(given, "rows", task.columns, "a list of texts, "))
    records = with_examples(task, records)
    for record in records:
        if record.error:
            raise InputError(record.error)
    return records
