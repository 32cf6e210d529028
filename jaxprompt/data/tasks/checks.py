"""Checks whether the parts of a task fit together."""

import dataclasses
import re

from jaxprompt.data.tasks.readers.candidates import check_candidates
from jaxprompt.data.tasks.readers.conversations import check_messages
from jaxprompt.data.tasks.readers.entities import check_entities, check_negative, relation_words
from jaxprompt.data.tasks.readers.predicates import check_predicate
from jaxprompt.data.tasks.tags import NO_SCHEME, OUTSIDE, iob2_labels
from jaxprompt.data.tasks.task import ANSWER_FIELDS, BINARY_METRICS, Task
from jaxprompt.errors import InputError, brief


def _fit_tags(task: Task) -> Task:
    """Fills in the tags of a tagging task from its types. Raises InputError for a misfit."""
    if task.scheme == NO_SCHEME:
        if task.predicate or task.metric in ("entity_f1", "role_f1"):
            name = "predicate" if task.predicate else "metric"
            raise InputError(
                f"task.{name}={getattr(task, name)} needs tags that span words, but "
                "task.scheme=none means that each tag is for one word; remove one of the two"
            )
        return task
    if task.metric == "accuracy":
        raise InputError(
            "task.metric=accuracy counts words, most of which are O if tags span words; use "
            "entity_f1, which reports the accuracy too, or task.scheme=none"
        )
    if not task.labels:
        return task
    labels = task.labels if OUTSIDE in task.labels else iob2_labels(task.labels)
    for name in labels:
        if name != OUTSIDE and not (name[:2] in ("B-", "I-") and name[2:].strip()):
            raise InputError(
                f"task.labels has {name!r}, which is not an IOB2 tag; give types, e.g. A0,A1, or O "
                "with the B- and I- tag of each type"
            )
    return dataclasses.replace(task, labels=labels)


def check_task(task: Task) -> Task:
    """Fills in a task's defaults. Raises InputError if its parts do not fit together."""
    _check_fields(task)
    are_types = task.kind == "tags" and task.scheme != NO_SCHEME
    if not are_types and (len(set(task.labels)) < len(task.labels) or len(task.labels) == 1):
        raise InputError(f"task.labels={','.join(task.labels)} must be 2 or more distinct labels")
    if task.answer_pattern:
        _check_pattern(task)
    if task.messages:
        check_messages(task)
    elif task.kind != "classes":
        _check_answer(task)
    check_entities(task)
    check_candidates(task)
    check_predicate(task)
    _check_positive(task)
    if task.predicate and task.markers:  # off by default, unlike those of relations
        placeholder = f"{{{task.fields[0]}}}"
        task = dataclasses.replace(
            task, plain=task.plain.replace(placeholder, f"{placeholder[:-1]}|marked}}")
        )
    if task.kind == "tags":
        return _fit_tags(task)
    if task.kind != "classes":
        return task
    check_negative(task)
    _check_classes(task)
    return _fit_classes(task) if task.labels else task


def _check_pattern(task: Task) -> None:
    """Raises InputError for a pattern of answers that no text is searched for, or that is none."""
    if not task.is_text:
        raise InputError(
            f"task.answer_pattern={brief(task.answer_pattern)} is searched for in generated texts, "
            f"but task {task.name} has {task.kind}; remove it"
        )
    try:
        re.compile(task.answer_pattern)
    except re.error as error:
        raise InputError(
            f"task.answer_pattern={brief(task.answer_pattern)} is no regular expression ({error}); "
            "fix it, or use number or boxed"
        ) from error


def _check_fields(task: Task) -> None:
    if not task.fields:
        raise InputError("task.fields is empty; list the text columns, e.g. ('text',)")
    for name in task.fields:
        if name in ("choice", "choices") or set(name) & set("|{}[]"):
            raise InputError(
                f"task.fields: {name!r} cannot be written in a template (choice, choices and | {{ "
                f"}} [ ] are reserved); rename the column"
            )


def _check_answer(task: Task) -> None:
    """Raises InputError if the column of a task's answers does not fit its other fields."""
    field = ANSWER_FIELDS[task.kind]
    column = getattr(task, field)
    for other in ("words", "choices") if task.kind == "tags" else ("labels", "words", "choices"):
        if getattr(task, other):
            raise InputError(
                f"task.{field}={column!r} and task.{other} are both set, but the answer is either "
                "in that column or a class; remove one of the two"
            )
    if column in task.fields:
        raise InputError(
            f"task.{field}={column!r} is also in task.fields, so the input would contain the "
            "answer; remove it from task.fields"
        )
    if task.limits and (len(task.limits) != 2 or not task.limits[0] < task.limits[1]):
        raise InputError(
            f"task.limits={task.limits!r} must be the minimum and the maximum, e.g. (0, 5)"
        )
    if task.kind == "tags" and len(task.fields) != 1:
        raise InputError(
            f"task.tags={task.tags!r} needs exactly one field, the column of the words, but "
            f"task.fields is {', '.join(task.fields)}"
        )


def _check_classes(task: Task) -> None:
    """Raises InputError if the classes of a task or their words are invalid."""
    if task.label in task.fields:
        raise InputError(
            f"task.fields includes {task.label!r}, the label column, so the input would contain "
            "the answer; remove it"
        )
    words = [word for group in task.words for word in group]
    if not all(task.words) or not all(name.strip() for name in (*task.labels, *words)):
        raise InputError(
            f"task.labels={task.labels!r} and task.words={task.words!r} must not have empty names"
        )


def _fit_classes(task: Task) -> Task:
    """Fills in words, targets and the positive class. Raises InputError for a misfit."""
    spell = relation_words if task.entities else str
    words = task.words or tuple((spell(name),) for name in task.labels)
    if len(words) != len(task.labels):
        raise InputError(
            f"task.words has {len(words)} entries for {len(task.labels)} labels; give one per "
            f"class, in the order {', '.join(task.labels)}"
        )
    positive = task.positive
    if task.metric in BINARY_METRICS and len(task.labels) == 2:
        positive = positive or task.labels[1]  # so that the run's record names it
    return dataclasses.replace(
        task, words=words, targets=task.targets or task.labels, positive=positive
    )


def _check_positive(task: Task) -> None:
    """Raises InputError if the positive class of binary metrics is not a class of the task."""
    has_classes = task.kind == "classes" and not task.choices
    is_unknown = bool(task.labels) and task.positive not in task.labels
    if task.positive and (is_unknown or not has_classes):
        raise InputError(
            f"task.positive={task.positive!r} is not a class of task {task.name}, which has "
            f"{', '.join(task.labels) or 'none'}; remove it, or set it to one of these"
        )
