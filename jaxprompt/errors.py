"""The one exception that means the user's input is wrong, and the small checks that raise it."""

import difflib
import math
from collections.abc import Collection, Iterable
from typing import Any

_SHOWN = {
    str: "text", bool: "true or false", int: "a whole number", float: "a finite number",
    tuple: "a list of texts",
}  # fmt: skip


class InputError(ValueError):
    """Bad input. The message is one line that names the value, the limit and the cure.

    The command line prints it without a traceback and exits with 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Lists what `name` may have meant: the close matches, else all of `known` (at most 12)."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    shown = close or known[:12]
    more = "" if close or len(known) <= 12 else f", ... ({len(known)} in all)"
    return ("nearest: " if close else "known: ") + ", ".join(shown) + more


def choose(name: str, value: str, known: Collection[str]) -> str:
    """Returns the value of a field if it is one of `known`. Raises InputError."""
    if value not in known:
        raise InputError(f"{name}={value!r} is unknown; {nearest(value, known)}")
    return value


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raises InputError where a value is not of a field's kind; whole numbers pass for floats."""
    allowed = (int, float) if kind is float else kind
    right = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
    if right and kind is float:
        right = math.isfinite(value)
    if right and kind is tuple:
        right = all(isinstance(part, str) for part in value)
    if not right:
        raise InputError(f"config field {name}={value!r} must be {_SHOWN[kind]}")


def at_least(name: str, value: float, limit: float) -> None:
    """Raises InputError where a field is below its limit."""
    if not value >= limit:
        raise InputError(f"{name}={value} must be at least {limit}")
