"""Reads rows of tasks that tag every word of a text."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxprompt.data.tasks.cells import cell_words, get_cell, is_blank
from jaxprompt.data.tasks.readers.predicates import read_predicate
from jaxprompt.data.tasks.tags import NO_SCHEME, find_scheme, iob2_labels, split_tag, to_iob2
from jaxprompt.data.tasks.task import PREDICATE, Example, Task
from jaxprompt.errors import InputError


def with_tags(
    task: Task, rows: Iterable[Mapping[str, Any]], origin: Callable[[int], str] | None
) -> Task:
    """Returns the tagging task with the scheme and the tags of its training rows, as IOB2."""
    if task.labels and task.scheme:
        return task
    where = origin or (lambda number: f"row {number + 1}")
    tags_of_rows = [_read_tags(task, row, where(number), True) for number, row in enumerate(rows)]
    scheme = task.scheme or find_scheme(tags_of_rows, where)
    iob2_tags = [to_iob2(tags, scheme, where(i)) for i, tags in enumerate(tags_of_rows)]
    tags_of_task = {tag for tags in iob2_tags for tag in tags}
    if scheme == NO_SCHEME:
        labels = tuple(sorted(tags_of_task))
    else:
        labels = iob2_labels(kind for _, kind in map(split_tag, tags_of_task) if kind)
    if len(labels) < 2:
        raise InputError(
            f"task.tags={task.tags!r} has only one tag in the training rows, {labels[0]!r}; a task "
            "needs 2 or more"
        )
    return dataclasses.replace(task, scheme=scheme, labels=task.labels or labels)


def word_spans(text: str, words: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the character span of each word in the text that the words were read from."""
    spans, position = [], 0
    for word in words:
        # From the last word's end on: a word may stand in the text more than once.
        position = text.index(word, position)
        spans.append((position, position + len(word)))
        position += len(word)
    return spans


def _read_tags(task: Task, row: Mapping[str, Any], where: str, needed: bool) -> tuple[str, ...]:
    """Reads the tags of a row as they are written, () if there are none and none is needed."""
    value = row.get(task.tags)
    if is_untagged(value):
        if needed:
            get_cell(row, task.tags, where)
            raise InputError(f"{where}: column {task.tags!r} has no tags; write one per word")
        return ()
    tags = value.split() if isinstance(value, str) else value
    if not isinstance(tags, (list, tuple)):
        raise InputError(f"{where}: column {task.tags!r} must be a list of tags, got {tags!r:.40}")
    tags_read = []
    for tag in tags:
        if type(tag) is int and 0 <= tag < len(task.values):
            tag = task.values[tag]
        if not isinstance(tag, str):
            raise InputError(
                f"{where}: column {task.tags!r} has the tag {tag!r:.40}; write tags as text, or "
                "for lists of tags set task.predicate to the column of their predicates"
            )
        tags_read.append(tag)
    return tuple(tags_read)


def is_untagged(value: Any) -> bool:
    """Returns whether a row has no tags: none, or -1 for every word, as the hub hides labels."""
    if isinstance(value, (list, tuple)):
        return all(type(tag) is int and tag == -1 for tag in value)
    return is_blank(value)


def _read_words(task: Task, row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Reads the words of a row: a list, or a text that is split at spaces."""
    (column,) = task.fields
    words = tuple(cell_words(get_cell(row, column, where), column, where))
    if not words or not all(word.strip() for word in words):
        raise InputError(
            f"{where}: column {column!r} has an empty word, or no words; write them, or remove the "
            "example"
        )
    return words


def read_tagged(task: Task, row: Mapping[str, Any], where: str, need_label: bool) -> Example:
    """Reads one row of a tagging task, see `read_example`."""
    words, tags = _read_words(task, row, where), _read_tags(task, row, where, need_label)
    if tags and len(tags) != len(words):
        raise InputError(
            f"{where}: {len(words)} words in column {task.fields[0]!r}, but {len(tags)} tags in "
            f"{task.tags!r}; give one tag per word"
        )
    # Any tag is right in IOB1: without training rows there is no scheme to check by.
    tags = tuple(to_iob2(tags, task.scheme or "iob1", where)) if tags else ()
    if unknown := [tag for tag in tags if tag not in task.labels]:
        if need_label:
            raise InputError(
                f"{where}: tag {unknown[0]!r} is not one of task {task.name}: "
                f"{', '.join(task.labels)}; fix it, or list all tags in task.labels"
            )
        tags = ()
    value = row[task.fields[0]]
    text = value if isinstance(value, str) else " ".join(words)
    fields = {task.fields[0]: text}
    if not task.predicate:
        return Example(fields, words=words, tags=tags)
    index = read_predicate(task, row, words, where)
    span = word_spans(text, words)[index]
    return Example(fields | {PREDICATE: words[index]}, words=words, tags=tags, entities=(span,))
