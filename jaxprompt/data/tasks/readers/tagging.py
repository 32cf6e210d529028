"""Reads rows of tasks that tag every word of a text."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxprompt.data.tasks.cells import cell_text, is_blank
from jaxprompt.data.tasks.counting import read_each
from jaxprompt.data.tasks.readers.predicates import read_predicate
from jaxprompt.data.tasks.tags import NO_SCHEME, find_scheme, iob2_labels, split_tag, to_iob2
from jaxprompt.data.tasks.task import PREDICATE, Example, Task
from jaxprompt.errors import InputError, show_columns


def with_tags(
    task: Task, rows: Iterable[Mapping[str, Any]], origin: Callable[[int], str] | None
) -> Task:
    """Returns the tagging task with the scheme and the tags of its training rows, as IOB2."""
    if task.labels and task.scheme:
        return task
    where = origin or (lambda number: f"row {number + 1}")
    tags_of_rows = [_read_tags(task, row, where(number), True) for number, row in enumerate(rows)]
    scheme = task.scheme or find_scheme(tags_of_rows, where)
    iob2_tags = read_each(
        lambda number: to_iob2(tags_of_rows[number], scheme, where(number)), len(tags_of_rows)
    )
    if scheme == NO_SCHEME:
        labels = tuple(sorted({tag for tags in iob2_tags for tag in tags}))
        if len(labels) < 2:
            raise InputError(
                f"task.tags={task.tags!r} has only one tag in the training rows, {labels[0]!r}; a "
                "task needs 2 or more"
            )
        return dataclasses.replace(task, labels=labels)
    types = {kind for tags in iob2_tags for _, kind in map(split_tag, tags) if kind}
    if not types:
        raise InputError(
            f"task.tags={task.tags!r} has only O in the training rows; a task needs entities"
        )
    return dataclasses.replace(task, scheme=scheme, labels=task.labels or iob2_labels(types))


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
            raise InputError(
                f"{where}: there are no tags in column {task.tags!r}; {show_columns(row)}"
            )
        return ()
    tags = value.split() if isinstance(value, str) else value
    if not isinstance(tags, (list, tuple)):
        raise InputError(f"{where}: column {task.tags!r} must be a list of tags, got {tags!r:.40}")
    names = task.values
    tags_read = []
    for word, tag in enumerate(tags):
        if isinstance(tag, int) and not isinstance(tag, bool) and 0 <= tag < len(names):
            tag = names[tag]
        if not isinstance(tag, str):
            lists = "; for lists of tags, set task.predicate to the column of the predicates"
            raise InputError(
                f"{where}: tag {word + 1} of column {task.tags!r} is {tag!r:.40}; write it as "
                f"text{lists * isinstance(tag, (list, tuple))}"
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
    if column not in row:
        raise InputError(
            f"{where}: column {column!r} of task {task.name} is missing; {show_columns(row)}"
        )
    value = row[column]
    if isinstance(value, (list, tuple)):
        words = tuple(cell_text(word, column, where) for word in value)
    else:
        words = tuple(cell_text(value, column, where).split())
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
    unknown = next((tag for tag in tags if tag not in task.labels), None)
    if unknown is not None:
        if need_label:
            raise InputError(
                f"{where}: tag {unknown!r} is not one of task {task.name}: "
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
