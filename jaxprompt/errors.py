"""The one exception that means the user's input is wrong, and the small checks that raise it."""

import difflib
from collections.abc import Collection, Iterable
from types import UnionType
from typing import Any

_SHOWN = {
    str: "text", bool: "true or false", int: "a whole number", float: "a finite number of float32",
    tuple: "a list of texts",
}  # fmt: skip
FLOAT32 = 3.4028234663852886e38  # the greatest number that float32 holds


class InputError(ValueError):
    """Bad input. The message is one line that names the value, the limit and the cure.

    The command line prints it without a traceback and exits with 2.
    """


# XLA's own, CUDA's within errors of other kinds, and that of cuBLASLt without room for a handle.
_FULL = ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY", "Failed to initialize BLASLT")


def out_of_memory(error: BaseException) -> str:
    """Returns what an error says of memory that ran out, "" for an error of another kind."""
    is_full = is_of_jax(error) and any(said in str(error) for said in _FULL)
    return first_line(error) if is_full or isinstance(error, MemoryError) else ""


def is_of_jax(error: BaseException) -> bool:
    """Tells whether an error comes from a device or its runtime, without importing jax."""
    return any(kind.__name__ == "JaxRuntimeError" for kind in type(error).__mro__)


def first_line(error: BaseException) -> str:
    """Gives what an error says first, at most 200 characters."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(". ")


def nearest(name: str, known: Iterable[str]) -> str:
    """Lists what `name` may have meant: the close matches, else all of `known` (at most 12)."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    shown = close or known[:12]
    more = "" if close or len(known) <= 12 else f", ... ({len(known)} in all)"
    return ("nearest: " if close else "known: ") + ", ".join(shown) + more


def with_article(word: str) -> str:
    """Puts the indefinite article before a word, as in "an electra"."""
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


def escape(text: str) -> str:
    """Writes what is not printable as Python does, "\\x1b" for ESC; line ends stay.

    What a terminal obeys, and half a surrogate pair, come from a user's data into messages.
    """
    if text.isprintable():
        return text
    shown = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    return "".join(shown)


def brief(value: Any) -> str:
    """Shows a value in a message, at most 80 characters of it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of over 4,300 digits; a deep list
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= 80 else text[:80] + "..."


def check_share(name: str, value: float) -> None:
    """Raises InputError for a share that is not in [0, 1)."""
    if not 0 <= value < 1:
        raise InputError(f"{name}={value} must be in [0, 1)")


def choose(name: str, value: Any, known: Collection[str]) -> str:
    """Returns `value` if it is one of `known`; `name` is a field, or words such as "the task".

    Raises InputError.
    """
    given = f"{name}{' ' if ' ' in name else '='}{brief(value)}"
    if not isinstance(value, str):
        raise InputError(f"{given} must be text; {nearest('', known)}")
    if value not in known:
        raise InputError(f"{given} is unknown; {nearest(value, known)}")
    return value


def show_columns(row: Iterable[str]) -> str:
    """Lists a row's columns for a message; quotes show white space around a name."""
    return "columns: " + ", ".join(name if name == name.strip() else repr(name) for name in row)


def is_kind(value: Any, kind: type) -> bool:
    """Tells whether a value is of a kind: bool, int, float, str, or tuple, which holds texts.

    Whole numbers pass for floats, which float32 must hold; UTF-8 must hold a text.
    """
    if kind is bool:
        return isinstance(value, bool)
    if kind is tuple:
        return isinstance(value, tuple) and all(is_kind(part, str) for part in value)
    if kind is str:
        return isinstance(value, str) and not has_surrogate(value)
    if not isinstance(value, (int, float) if kind is float else int) or isinstance(value, bool):
        return False
    return kind is int or abs(value) <= FLOAT32


def has_surrogate(text: str) -> bool:
    """Tells whether a text holds half a surrogate pair, which no file or tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raises InputError where a value is not of a field's kind, see `is_kind`."""
    if not is_kind(value, kind):
        raise InputError(f"config field {name}={brief(value)} must be {_SHOWN[kind]}")


def check_type(argument: str, given: Any, kind: type | UnionType, cure: str) -> None:
    """Raises InputError where an argument in Python is not of a type; `cure` says what to give."""
    if not isinstance(given, kind):
        raise InputError(f"{argument}={brief(given)} is a {type(given).__name__}; give {cure}")


def at_least(name: str, value: float, limit: float) -> None:
    """Raises InputError where a field is below its limit, or no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name}={brief(value)} must be a number, at least {limit}")
    if not value >= limit:
        raise InputError(f"{name}={value} must be at least {limit}")
