"""The values of single cells: which are texts, and how a label is spelled."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxprompt.errors import InputError

_WHOLE = re.compile(r"(-?[0-9]{1,18})(\.0+)?")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_TAGS = "; a tag for every word is task.tags={} with head.name=tags"
_HALF = re.compile("[\ud800-\udfff]")


def unreadable(value: Any) -> str:
    """Describes a value that is no text, as JSON calls it: null, NaN, a list; "" = it is one."""
    if value is None:
        return "null"
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return "NaN" if value != value else "an infinite number"
    for kind, name in ((Mapping, "object"), ((list, tuple, set), "list"), (bytes, "bytes")):
        if isinstance(value, kind):
            return f"the {name} {value!r:.40}"
    if isinstance(value, str) and _HALF.search(value):
        return "half a character (a lone surrogate)"
    return ""


def is_blank(value: Any) -> bool:
    """Tells whether a cell holds nothing: null, NaN, or spaces alone."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def read_text(value: Any, column: str, where: str) -> str:
    """Gives a cell as text. Raises InputError for null, NaN, a list, an object or bytes."""
    if what := unreadable(value):
        raise InputError(
            f"{where}: column {column!r} holds {what}, which is no text; write a text there, or "
            "leave the example out"
        )
    return str(value)


def check_label(value: Any, column: str, where: Callable[[], str]) -> None:
    """Raises InputError for a value that cannot be a label: null, NaN, blank, a list, an object."""
    if what := unreadable(value) or is_blank(value) and "nothing":
        raise InputError(
            f"{where()}: label column {column!r} holds {what}, which is no label; write a label "
            f"there, or leave the example out{_TAGS.format(column) * isinstance(value, list)}"
        )


def spelling(value: Any) -> str:
    """Spells a label or a short text: true and false as JSON does, 2.0 as 2."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():  # whole numbers of a column with gaps
        return str(int(value))
    return str(value)


def is_number(text: str) -> bool:
    """Tells whether a text writes a number in digits: "3", "-1", "+1", "0.5", "1e-3"."""
    return bool(_NUMBER.fullmatch(text))


def whole(text: str) -> str:
    """Spells "2.0" as "2", which is how pandas writes whole numbers of a column with gaps."""
    found = _WHOLE.fullmatch(text)
    return found[1] if found else text


def class_names(spelled: Iterable[str]) -> tuple[str, ...]:
    """Lists distinct labels, in numeric order if all are whole numbers, else sorted."""
    names = set(spelled)
    if all(map(_WHOLE.fullmatch, names)):
        return tuple(sorted(set(map(whole, names)), key=lambda name: (int(name), name)))
    return tuple(sorted(names))
