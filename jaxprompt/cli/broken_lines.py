"""Lines of the input that cannot be read: they stop a command, or are told and skipped."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxprompt.errors import InputError, escape


def answer_or_mend(
    answer: Callable[[Any], Any], mend: Callable[[Any], Any], given: Any
) -> tuple[Any, Any]:
    """Answers what is given. -> the same, and the answers

    Where that cannot be encoded, `mend` puts errors in the place of the examples at fault.
    """
    try:
        return given, answer(given)
    except InputError:
        mended = mend(given)
        if mended == given:
            raise
    return mended, answer(mended)


def check(given: Sequence[Any], on_error: str) -> None:
    """Raises the first error of the input, unless such lines are to be skipped."""
    broken = [record.error for record in given if record.error]
    if broken and on_error == "raise":
        raise InputError(f"{broken[0]}; --on-error=skip predicts the others")


def tell(given: Sequence[Any]) -> None:
    """Says how many lines of the input have an error, and the first."""
    broken = [record.error for record in given if record.error]
    if broken:
        told = f"{len(broken)} of {len(given)} lines cannot be read, the first is {broken[0]}"
        print(escape(told), file=sys.stderr)
