"""Tags that are the roles of a predicate: which word that is, and rows with several predicates."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxprompt.data.tasks.cells import get_cell, spelling, whole_number
from jaxprompt.data.tasks.task import PREDICATE, Task
from jaxprompt.errors import InputError


def check_predicate(task: Task) -> None:
    """Raises InputError if a task's settings for predicates do not fit."""
    if not task.predicate:
        if task.metric == "role_f1":
            raise InputError(
                "metric role_f1 compares the roles of predicates; set task.predicate to their "
                "column, or use task.metric=entity_f1"
            )
        return
    if task.kind != "tags":
        raise InputError(
            f"task.predicate={task.predicate!r} is only valid for a task that tags words; set "
            "task.tags to the column of their tags"
        )
    if task.predicate in (*task.fields, task.tags) or PREDICATE in task.fields:
        raise InputError(
            f"task.predicate={task.predicate!r} must be the column with the index of the "
            f"predicate, not in task.fields or task.tags; no field may be called {PREDICATE!r}, "
            "the name of the predicate in templates"
        )
    if task.markers and len(task.markers) != 2:
        raise InputError(
            f"task.markers has {len(task.markers)} words for 1 predicate; give two: one before it "
            "and one after it"
        )


def predicate_rows(task: Task, row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Makes one row per predicate that a row lists, with the tags of that predicate.

    A row with one predicate, or without tags, stays as it is.
    """
    indices = row.get(task.predicate)
    if not isinstance(indices, (list, tuple)):
        return [row]
    if not indices:
        raise InputError(
            f"{where}: column {task.predicate!r} lists no predicate; give the index of one, or "
            "remove the row"
        )
    tags = row.get(task.tags)
    if tags is None:
        return [{**row, task.predicate: index} for index in indices]
    if not isinstance(tags, (list, tuple)) or len(tags) != len(indices):
        raise InputError(
            f"{where}: column {task.predicate!r} lists {len(indices)} predicates; column "
            f"{task.tags!r} must be a list with the tags of each, got {tags!r:.40}"
        )
    pairs = zip(indices, tags, strict=True)
    return [{**row, task.predicate: i, task.tags: tags_of_one} for i, tags_of_one in pairs]


def read_predicate(task: Task, row: Mapping[str, Any], words: Sequence[str], where: str) -> int:
    """Reads the index of the predicate among the words of a row."""
    value = get_cell(row, task.predicate, where)
    number = "" if isinstance(value, bool) else whole_number(spelling(value))
    if not re.fullmatch("[0-9]{1,9}", number) or int(number) >= len(words):
        raise InputError(
            f"{where}: column {task.predicate!r} is {value!r:.40}; it must be the index of the "
            f"predicate among the {len(words)} words, 0 to {len(words) - 1}"
        )
    return int(number)
