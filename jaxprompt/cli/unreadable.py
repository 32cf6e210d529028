"""Input lines that cannot be read: they stop a command, or are reported and skipped."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxprompt.errors import InputError, escape


def answer_encodable(
    answer: Callable[[Any], Any], mark: Callable[[Any], Any], given: Any
) -> tuple[Any, Any]:
    """Answers the examples of records. Returns the records, and the answers.

    If some cannot be encoded, `mark` replaces these with errors, and the others are answered.
    """
    try:
        return given, answer(given)
    except InputError:
        marked = mark(given)
        if marked == given:
            raise
    return marked, answer(marked)


def raise_first(given: Sequence[Any], on_error: str) -> None:
    """Raises the first error of the input, unless `on_error` says to skip such lines."""
    broken = [record.error for record in given if record.error]
    if broken and on_error == "raise":
        raise InputError(f"{broken[0]}; use --on-error=skip to predict the other lines")


def report(given: Sequence[Any]) -> None:
    """Prints how many input lines have an error, and the first error."""
    broken = [record.error for record in given if record.error]
    if broken:
        line = f"{len(broken)} of {len(given)} lines cannot be read, the first is {broken[0]}"
        print(escape(line), file=sys.stderr)
