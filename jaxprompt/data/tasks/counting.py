"""Errors that may occur in many rows of a file: all rows are read, and the error rows counted."""

from collections.abc import Callable
from typing import Any

from jaxprompt.data.tasks.readers.answering import MisplacedAnswer
from jaxprompt.data.tasks.tags import IllegalTag
from jaxprompt.errors import InputError

_CALLED = {MisplacedAnswer: "an answer", IllegalTag: "a tag"}


def read_each(read: Callable[[int], Any], count: int) -> list[Any]:
    """Returns what `read` returns for the rows 0 to count - 1.

    Raises the first InputError; for those in `_CALLED` its message says how many rows have the same
    problem.
    """
    found, first, wrong = [], None, 0
    for number in range(count):
        try:
            found.append(read(number))
        except tuple(_CALLED) as error:
            first, wrong = first or error, wrong + 1
    if first is not None:
        told = f"{wrong} of {count} rows have {_CALLED[type(first)]} like this"
        raise InputError(f"{first}; {told}") from first
    return found
