"""The values of single cells: which are text, and how labels are written."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxprompt.errors import InputError

_WHOLE = re.compile(r"(-?[0-9]{1,18})(\.0+)?")
_TABLE = re.compile(r"(?<=\.[ct]sv):\d+$|(?<=\.[ct]sv\.gz):\d+$")  # line in a table's "file:line"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def get_cell(row: Mapping[str, Any], column: str, where: str) -> Any:
    """Returns a cell of a row. Raises InputError if there is no column."""
    if column not in row:
        raise InputError(
            f"{missing_column(row, column, where)}; rename one, or train with "
            "task.fields, task.label etc. that name the columns of your file"
        )
    return row[column]


def missing_column(row: Iterable[str], column: str, where: str, remark: str = "") -> str:
    """Returns the beginning of a message: which column is missing where, and which there are.

    The place is that of the row, or for CSV and TSV the header. The columns are quoted where they
    start or end with white space or contain a comma.
    """
    columns = {name: repr(name) if name != name.strip() or "," in name else name for name in row}
    near = difflib.get_close_matches(column, columns, n=1)
    nearest = f"; nearest: {columns[near[0]]}" if near else ""
    return (
        f"{_TABLE.sub(', header', where)}: there is no column {column!r}{remark}; "
        f"columns: {', '.join(columns.values())}{nearest}"
    )


def describe_non_text(value: Any) -> str:
    """Names the kind of a value: null, nan, a list, an object or bytes; "" if it is text."""
    if value is None:
        return "null"
    is_text = not isinstance(value, Mapping | list | tuple | set | bytes)
    if is_text and not (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return f"{value!r:.40}"


def is_blank(value: Any) -> bool:
    """Returns whether a cell is empty: null, NaN, or only white space."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def cell_text(value: Any, column: str, where: str, *, lines: bool = False) -> str:
    """Returns a cell as text; with `lines`, a list of texts is joined as lines.

    Raises InputError for null, NaN, a list, an object or bytes.
    """
    if lines and isinstance(value, list | tuple):
        return "\n".join(cell_text(line, column, where) for line in value)
    if description := describe_non_text(value):
        raise InputError(
            f"{where}: column {column!r} is {description}, not text; write a text there, or "
            "remove the example"
        )
    return str(value)


def cell_words(value: Any, column: str, where: str) -> list[str]:
    """Returns the words of a cell: a list of texts, or a text that is split at spaces."""
    if isinstance(value, list | tuple):
        return [cell_text(word, column, where) for word in value]
    return cell_text(value, column, where).split()


def check_label(value: Any, column: str, where: str) -> None:
    """Raises InputError for a value that cannot be a label: null, NaN, blank, a list, an object."""
    if description := describe_non_text(value) or is_blank(value) and "empty":
        raise InputError(
            f"{where}: column {column!r} is {description}, which is not a label; write a label "
            "there, or remove the example; for one tag per word, set task.tags"
        )


def spelling(value: Any) -> str:
    """Returns a label or a short text as a string: true and false as in JSON, 2.0 as 2."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():  # whole numbers of a column with gaps
        return str(int(value))
    return str(value)


def is_number(text: str) -> bool:
    """Returns whether a text is a number in digits: "3", "-1", "+1", "0.5", "1e-3"."""
    return bool(_NUMBER.fullmatch(text))


def whole_number(text: str) -> str:
    """Returns "2.0" as "2": pandas writes whole numbers of a column with gaps as floats."""
    match = _WHOLE.fullmatch(text)
    return match[1] if match else text


def class_names(spellings: Iterable[str]) -> tuple[str, ...]:
    """Returns the distinct labels, in numeric order if all are whole numbers, else sorted."""
    names = set(spellings)
    if all(map(_WHOLE.fullmatch, names)):
        return tuple(sorted(set(map(whole_number, names)), key=lambda name: (int(name), name)))
    return tuple(sorted(names))
