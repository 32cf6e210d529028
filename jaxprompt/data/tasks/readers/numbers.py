"""Reads rows of tasks whose answer is a number."""

import math
from collections.abc import Mapping
from typing import Any

from jaxprompt.data.tasks.cells import is_blank
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError, show_columns


def read_number(task: Task, row: Mapping[str, Any], where: str, needed: bool) -> float | None:
    """Reads the number of a row, None if it has none and none is needed.

    Unless `needed`, a number outside the task's limits counts as none: test rows hide theirs as -1.
    """
    value = row.get(task.number)
    if is_blank(value) and not needed:
        return None
    if task.number not in row:
        raise InputError(f"{where}: there is no column {task.number!r}; {show_columns(row)}")
    try:
        # float() takes true and false for 1 and 0.
        number = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(
            f"{where}: column {task.number!r} is {value!r:.40}, not a number; write one there, or "
            "remove the example"
        )
    if task.limits and not task.limits[0] <= number <= task.limits[1]:
        if not needed:
            return None
        raise InputError(
            f"{where}: {task.number} is {number:g}; for task {task.name} it must be between "
            f"{task.limits[0]:g} and {task.limits[1]:g}"
        )
    return number
