"""Rows of tasks that tag every word of a text."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxprompt.data.tags import find_scheme, labels_of, split_tag, to_iob2
from jaxprompt.data.tasks.cells import read_text
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.errors import InputError


def with_tags(
    task: Task, rows: Iterable[Mapping[str, Any]], origin: Callable[[int], str] | None
) -> Task:
    """The tagging task with its scheme and its tags, in IOB2, taken from the training rows."""
    if task.labels and task.scheme:
        return task
    where = origin or (lambda number: f"row {number + 1}")
    every = [_tags(task, row, where(number), True) for number, row in enumerate(rows)]
    scheme = task.scheme or find_scheme(every, where)
    types = set()
    for number, tags in enumerate(every):
        types |= {kind for _, kind in map(split_tag, to_iob2(tags, scheme, where(number))) if kind}
    if not types:
        raise InputError(f"task.tags={task.tags!r} has no entity in the training rows, only O")
    return dataclasses.replace(task, scheme=scheme, labels=task.labels or labels_of(types))


def _tags(task: Task, row: Mapping[str, Any], where: str, needed: bool) -> tuple[str, ...]:
    """Reads the tags of a row as they are written, () where there are none and none is needed."""
    value = row.get(task.tags)
    if value is None or (isinstance(value, str) and not value.strip()):
        if needed:
            raise InputError(f"{where}: no tags in column {task.tags!r}; columns: {', '.join(row)}")
        return ()
    tags = value.split() if isinstance(value, str) else value
    if not isinstance(tags, (list, tuple)):
        raise InputError(
            f"{where}: column {task.tags!r} must hold a list of tags, not {tags!r:.40}"
        )
    names = task.values
    found = []
    for word, tag in enumerate(tags):
        if isinstance(tag, int) and not isinstance(tag, bool) and 0 <= tag < len(names):
            tag = names[tag]
        if not isinstance(tag, str):
            raise InputError(
                f"{where}: tag {word + 1} of column {task.tags!r} is {tag!r:.40}; write it as text"
            )
        found.append(tag)
    return tuple(found)


def _words(task: Task, row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Reads the words of a row: a list of them, or a text with spaces between them."""
    (column,) = task.fields
    if column not in row:
        raise InputError(
            f"{where}: column {column!r} of task {task.name} is missing; columns: {', '.join(row)}"
        )
    value = row[column]
    if isinstance(value, (list, tuple)):
        words = tuple(read_text(word, column, where) for word in value)
    else:
        words = tuple(read_text(value, column, where).split())
    if not words or not all(word.strip() for word in words):
        raise InputError(f"{where}: column {column!r} has a word without letters, or none at all")
    return words


def read_tagged(task: Task, row: Mapping[str, Any], where: str, need_label: bool) -> Example:
    """Reads one row of a tagging task, see `read_example`."""
    words, tags = _words(task, row, where), _tags(task, row, where, need_label)
    if tags and len(tags) != len(words):
        raise InputError(
            f"{where}: {len(words)} words in column {task.fields[0]!r}, but {len(tags)} tags in "
            f"{task.tags!r}; give each word one"
        )
    tags = tuple(to_iob2(tags, task.scheme or "iob1", where)) if tags else ()
    unknown = next((tag for tag in tags if tag not in task.labels), None)
    if unknown is not None:
        if need_label:
            raise InputError(
                f"{where}: tag {unknown!r} is not one of task {task.name}: {', '.join(task.labels)}"
            )
        tags = ()
    value = row[task.fields[0]]
    text = value if isinstance(value, str) else " ".join(words)
    return Example({task.fields[0]: text}, words=words, tags=tags)
