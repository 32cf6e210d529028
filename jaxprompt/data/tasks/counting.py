"""Errors that may occur in many rows of a file: all rows are read, and the error rows counted."""

from collections.abc import Callable
from typing import Any

from jaxprompt.data.tasks.readers.answering import MisplacedAnswer
from jaxprompt.data.tasks.tags import IllegalTag
from jaxprompt.errors import InputError

_NOUNS = {MisplacedAnswer: "an answer", IllegalTag: "a tag"}


def read_each(read: Callable[[int], Any], count: int) -> list[Any]:
    """Returns what `read` returns for the rows 0 to count - 1.

    Raises the first InputError; for those in `_NOUNS` its message says how many rows have the same
    problem.
    """
    results, first, num_errors = [], None, 0
    for number in range(count):
        try:
            results.append(read(number))
        except tuple(_NOUNS) as error:
            first, num_errors = first or error, num_errors + 1
    if first is not None:
        count_note = f"{num_errors} of {count} rows have {_NOUNS[type(first)]} like this"
        raise InputError(f"{first}; {count_note}") from first
    return results
