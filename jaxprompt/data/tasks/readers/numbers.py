"""Reads rows of tasks whose answer is a number."""

import math
from collections.abc import Mapping
from typing import Any

from jaxprompt.data.tasks.cells import get_cell, is_blank
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError


def read_number(task: Task, row: Mapping[str, Any], where: str, needed: bool) -> float | None:
    """Reads the number of a row, None if it has none and none is needed.

    Unless `needed`, a number outside the task's limits counts as none: test rows hide theirs as -1.
    """
    if not needed and is_blank(row.get(task.number)):
        return None
    value = get_cell(row, task.number, where)
    try:
        # float() takes true and false for 1 and 0.
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    low, high = task.limits or (-math.inf, math.inf)
    if math.isfinite(number) and low <= number <= high:
        return number
    if math.isfinite(number) and not needed:
        return None
    limits = f" from {low:g} to {high:g}" if task.limits else ""
    raise InputError(
        f"{where}: column {task.number!r} is {value!r:.40}, not a number{limits}; write one there, "
        "or remove the example"
    )
