"""Input lines that cannot be read: they stop a command, or are reported and skipped."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxprompt.errors import InputError, escape


def answer_encodable(
    answer: Callable[[Any], Any], mark: Callable[[Any], Any], records: Any
) -> tuple[Any, Any]:
    """Answers the examples of records. Returns the records, and the answers.

    If some cannot be encoded, `mark` replaces these with errors, and the others are answered.
    """
    try:
        return records, answer(records)
    except InputError:
        marked = mark(records)
        if marked == records:
            raise
    return marked, answer(marked)


def raise_first(records: Sequence[Any], on_error: str) -> None:
    """Raises the first error of the input, unless `on_error` says to skip such lines."""
    errors = [record.error for record in records if record.error]
    if errors and on_error == "raise":
        raise InputError(f"{errors[0]}; use --on-error=skip to predict the other lines")


def report(records: Sequence[Any]) -> None:
    """Prints how many input lines have an error, and the first error."""
    errors = [record.error for record in records if record.error]
    if errors:
        line = f"{len(errors)} of {len(records)} lines cannot be read, the first is {errors[0]}"
        print(escape(line), file=sys.stderr)
