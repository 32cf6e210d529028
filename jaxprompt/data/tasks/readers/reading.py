"""Reads and checks rows of tasks as examples."""

import dataclasses
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxprompt.data.tasks.cells import (
    cell_text,
    check_label,
    class_names,
    describe_non_text,
    get_cell,
    is_blank,
    spelling,
    whole_number,
)
from jaxprompt.data.tasks.checks import check_task
from jaxprompt.data.tasks.readers.answering import read_answered
from jaxprompt.data.tasks.readers.candidates import question_id
from jaxprompt.data.tasks.readers.conversations import has_answer, read_conversation
from jaxprompt.data.tasks.readers.entities import read_entities
from jaxprompt.data.tasks.readers.numbers import read_number
from jaxprompt.data.tasks.readers.tagging import is_untagged, read_tagged, with_tags
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.errors import InputError

_FAKE = "FAKE_ANSWER_"  # beginning of the answers in CLUE's test set of CMRC 2018


def with_labels(
    task: Task,
    rows: Iterable[Mapping[str, Any]],
    origin: Callable[[int], str] | None = None,
    classes: Sequence[str] = (),
) -> Task:
    """Returns the task with class names from the training rows, unless it has or needs none.

    Args:
      task: the task.
      rows: the training rows.
      origin: returns the place of row i, for messages.
      classes: names of the classes in the data set, in the order of their indices.

    Raises:
      InputError: if a label is not among `classes`, or all rows have the same label.
    """
    if task.kind == "tags":
        return with_tags(task, rows, origin)
    if task.labels or task.choices or task.kind != "classes":
        return task
    where = origin or (lambda number: f"row {number + 1}")
    names = () if task.candidates else tuple(map(spelling, classes))
    spellings = set()
    for number, row in enumerate(rows):
        _check_has_label(task, row, where(number))
        for value in row_labels(task, row):
            check_label(value, task.label, where(number))
            if names and spelling(value) not in names:
                raise _unknown_label_error(task, value, names, where(number))
            spellings.add(spelling(value))
    labels = class_names(spellings)
    if len(labels) == 1:
        raise InputError(
            f"every training row has the {task.label} {labels[0]!r}, but a task needs 2 or more "
            "classes; check the file, or list all classes in task.labels"
        )
    return check_task(dataclasses.replace(task, labels=names or labels))


def _check_has_label(task: Task, row: Mapping[str, Any], where: str) -> None:
    """Raises InputError for a row without the column of the label, or a correct candidate."""
    if task.candidates and task.label not in row and task.candidates[1] in row:
        raise InputError(
            f"{where}: column {task.candidates[1]!r} lists no correct candidate; list 1 or more, "
            "or remove the example"
        )
    get_cell(row, task.label, where)


def row_labels(task: Task, row: Mapping[str, Any]) -> Sequence[Any]:
    """Lists the labels of a row; a task of relations may have several per row."""
    value = row.get(task.label)
    return value if task.entities and isinstance(value, (list, tuple)) and value else (value,)


def has_label(task: Task, row: Mapping[str, Any]) -> bool:
    """Returns whether a row has a label or target that is not blank, NaN, null or hidden (-1).

    Answers that are an empty list count as none: from one row alone it is unclear whether they are
    hidden or its question has no answer. So do the placeholders in CLUE's hidden test sets.
    """
    if task.messages:
        return has_answer(task, row)
    value = row.get(task.target or task.tags or task.answers or task.number or task.label)
    if task.answers and isinstance(value, Mapping):
        texts = value.get("text")
        if not isinstance(texts, (list, tuple)):
            return True
        return bool(texts) and not all(str(text).startswith(_FAKE) for text in texts)
    if task.kind == "tags":
        return not is_untagged(value)
    if task.kind != "classes" or (task.entities and isinstance(value, (list, tuple))):
        return bool(value) if isinstance(value, (list, tuple)) else not is_blank(value)
    # The hub's data sets hide labels as -1, which may also be the name of a class.
    hidden = whole_number(spelling(value)) == "-1" and "-1" not in task.label_table
    return not is_blank(value) and not hidden


def read_example(
    task: Task,
    row: Mapping[str, Any],
    where: str,
    need_label: bool = True,
    need_place: bool = True,
) -> Example:
    """Reads one row.

    An answer that is not where the row says is taken from the nearest position in the text. If the
    row also has the name of its label, in a column named like the label column plus "_text", a name
    that the task knows takes precedence over the number, because data sets number classes
    differently.

    Args:
      task: the task.
      row: the row.
      where: the place of the row ("file:line"), for messages.
      need_label: with False, a label that is missing, hidden (-1) or unknown to the task becomes
        -1, and a target that is missing or empty becomes "". Empty texts in a list of references
        are always dropped.
      need_place: with False, only the words of answers are compared, and they may be anywhere.
    """
    if task.kind == "tags":
        return read_tagged(task, row, where, need_label)
    if task.messages:
        return read_conversation(task, row, where, need_label)
    fields: dict[str, str] = {}
    spans: tuple[tuple[int, int], ...] = ()
    if task.entities:
        marked = read_entities(task, row, where)
        fields, spans = {task.fields[0]: marked.text} | marked.names(), marked.spans
    # If there are entities, the first field is already read.
    for name in task.fields[bool(spans) :]:
        column, texts = task.derive.get(name, (name, None))
        value = _field_text(task, row, column, where)
        fields[name] = value if texts is None else _derived_text(texts, column, value, where)
    if task.kind == "spans":
        return read_answered(task, row, fields, where, need_label, need_place)
    if task.is_text:
        references = _read_references(task.target, row, where, need_label)
        return Example(fields, target="".join(references[:1]), references=references)
    if task.number:
        return Example(fields, number=read_number(task, row, where, need_label))
    choices_of_row = () if task.options else _read_choices(task, row, where)
    # Options are the same in all rows, so their labels are read like those of classes.
    choices = task.options or choices_of_row
    is_hidden = not need_label and not has_label(task, row)
    question = question_id(task, row, where, needed=not is_hidden)
    if need_label:
        _check_has_label(task, row, where)
    if is_hidden:
        return Example(fields, choices, -1, entities=spans, question=question)
    labels = []
    for value in row_labels(task, row):
        labels.append(_label_index(task, {**row, task.label: value}, choices_of_row, where))
        if labels[-1] < 0 and need_label:
            check_label(value, task.label, where)
            raise _unknown_label_error(task, value, choices_of_row or task.labels, where)
    # One unknown label among several leaves the example without any.
    label = labels[0] if min(labels) >= 0 else -1
    references = tuple(task.labels[i] for i in labels) if len(labels) > 1 and label >= 0 else ()
    return Example(fields, choices, label, references=references, entities=spans, question=question)


def _unknown_label_error(task: Task, value: Any, labels: Sequence[str], where: str) -> InputError:
    listing = ", ".join(labels[:20]) + (f", ... ({len(labels)} in all)" if len(labels) > 20 else "")
    advice = "" if task.name == "custom" else f"; for other labels set {custom_fields(task)}"
    return InputError(
        f"{where}: label {value!r} is not a label of task {task.name}; labels: {listing}{advice}"
    )


def custom_fields(task: Task) -> str:
    """Returns the config fields of a custom task with the columns of a built-in one."""
    return f"task.name=custom, task.fields={','.join(task.fields)} and task.label={task.label}"


def read_all(
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    origin: Callable[[int], str],
    *,
    need_place: bool = True,
) -> list[Example]:
    """Reads labelled rows. Raises InputError for the first that is invalid."""
    # In order, as data sets on disk are read faster so.
    return [
        read_example(task, row, origin(number), need_place=need_place)
        for number, row in enumerate(rows)
    ]


def _field_text(task: Task, row: Mapping[str, Any], column: str, where: str) -> str:
    return cell_text(get_cell(row, column, where), column, where, lines=column in task.lines)


def _derived_text(texts: Mapping[str, str], column: str, value: str, where: str) -> str:
    if value not in texts:
        raise InputError(f"{where}: {column} is {value!r}; it must be one of {', '.join(texts)}")
    return texts[value]


def _read_choices(task: Task, row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    if len(task.choices) != 1:
        choices = tuple(_field_text(task, row, column, where) for column in task.choices)
    else:
        (column,) = task.choices
        value = row.get(column)
        if not isinstance(value, (list, tuple)) or len(value) < 2:
            raise InputError(f"{where}: column {column!r} must be a list of 2 or more choices")
        choices = tuple(cell_text(text, column, where) for text in value)
    max_choices = len(task.words) or len(string.ascii_uppercase)
    if len(choices) > max_choices:
        raise InputError(
            f"{where}: {len(choices)} choices, but task {task.name} has names for only "
            f"{max_choices}; shorten the list, or remove the row"
        )
    return choices


def _read_references(
    column: str, row: Mapping[str, Any], where: str, needed: bool
) -> tuple[str, ...]:
    value = get_cell(row, column, where) if needed else row.get(column)
    texts = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    for text in texts:
        cell_text(text, column, where)  # raises if it is no text
    references = tuple(text for text in map(spelling, texts) if text.strip())
    if needed and not references:
        raise InputError(
            f"{where}: target column {column!r} is empty; write a text, or remove the row"
        )
    return references


def _label_index(task: Task, row: Mapping[str, Any], choices: tuple[str, ...], where: str) -> int:
    """Returns the class of a row, -1 if the task does not know it."""
    value, name = row.get(task.label), row.get(f"{task.label}_text")
    if isinstance(name, str) and name in task.labels and not choices:
        return task.labels.index(name)
    if describe_non_text(value):
        return -1
    spelled, is_custom = spelling(value), task.name == "custom"
    # With `values`, a choice may be equal to one of them. In built-in tasks a number is an index;
    # in a user's file it may be the text of a choice.
    if is_custom and choices and spelled not in choices:  # in a column with gaps 2 is 2.0
        spelled, choices = whole_number(spelled), tuple(map(whole_number, choices))
    if spelled in choices and not task.values and (is_custom or isinstance(value, str)):
        index, other_index = choices.index(spelled), task.label_table.get(spelled, -1)
        if is_custom and other_index != index and 0 <= other_index < len(choices):
            letters = string.ascii_uppercase
            raise InputError(
                f"{where}: {task.label} {value!r} is both the text of choice {letters[index]} and "
                f"the letter or index of choice {letters[other_index]}; give the correct choices "
                "as indices (0, 1, ...) or letters (A, B, ...) that are no texts of choices"
            )
        return index
    index = task.label_table.get(spelled, task.label_table.get(whole_number(spelled), -1))
    return -1 if choices and index >= len(choices) else index
