"""What may be wrong in many rows of a file: read on, and told with the number of rows."""

from collections.abc import Callable
from typing import Any

from jaxprompt.data.tasks.readers.answering import MisplacedAnswer
from jaxprompt.data.tasks.tags import IllegalTag
from jaxprompt.errors import InputError

_CALLED = {MisplacedAnswer: "an answer", IllegalTag: "a tag"}


def read_each(read: Callable[[int], Any], count: int) -> list[Any]:
    """Gives what `read` makes of the rows 0 to count - 1.

    Raises the first InputError; of those in `_CALLED` it says how many rows have such.
    """
    found, first, wrong = [], None, 0
    for number in range(count):
        try:
            found.append(read(number))
        except tuple(_CALLED) as error:
            first, wrong = first or error, wrong + 1
    if first is not None:
        told = f"{wrong} of {count} rows have such {_CALLED[type(first)]}"
        raise InputError(f"{first}; {told}") from first
    return found
