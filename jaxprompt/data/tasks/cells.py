"""The values of single cells: which are text, and how labels are written."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxprompt.errors import InputError

_WHOLE = re.compile(r"(-?[0-9]{1,18})(\.0+)?")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_TAGS = "; for one tag per word, use task.tags={} with head.name=tags"
_SURROGATE = re.compile("[\ud800-\udfff]")


def describe_non_text(value: Any) -> str:
    """Describes a value that is not text, in JSON terms: null, NaN, a list; "" if it is text."""
    if value is None:
        return "null"
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return "NaN" if value != value else "an infinite number"
    for kind, name in ((Mapping, "object"), ((list, tuple, set), "list"), (bytes, "bytes")):
        if isinstance(value, kind):
            return f"the {name} {value!r:.40}"
    if isinstance(value, str) and _SURROGATE.search(value):
        return "half a character (a lone surrogate)"
    return ""


def is_blank(value: Any) -> bool:
    """Returns whether a cell is empty: null, NaN, or only white space."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def cell_text(value: Any, column: str, where: str) -> str:
    """Returns a cell as text. Raises InputError for null, NaN, a list, an object or bytes."""
    if description := describe_non_text(value):
        raise InputError(
            f"{where}: column {column!r} is {description}, not text; write a text there, or "
            "remove the example"
        )
    return str(value)


def check_label(value: Any, column: str, where: Callable[[], str]) -> None:
    """Raises InputError for a value that cannot be a label: null, NaN, blank, a list, an object."""
    if description := describe_non_text(value) or is_blank(value) and "empty":
        hint = _TAGS.format(column) if isinstance(value, list) else ""
        raise InputError(
            f"{where()}: label column {column!r} is {description}, which is not a label; write a "
            f"label there, or remove the example{hint}"
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
