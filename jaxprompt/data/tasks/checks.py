"""Checks whether the parts of a task fit together."""

import dataclasses

from jaxprompt.data.tasks.readers.candidates import check_candidates
from jaxprompt.data.tasks.readers.entities import check_entities, check_negative, relation_words
from jaxprompt.data.tasks.readers.predicates import check_predicate
from jaxprompt.data.tasks.tags import NO_SCHEME, OUTSIDE, iob2_labels
from jaxprompt.data.tasks.task import BINARY_METRICS, Task, check_column
from jaxprompt.errors import InputError, nearest


def _iob2(labels: tuple[str, ...]) -> tuple[str, ...]:
    for name in labels:
        if name != OUTSIDE and not (name[:2] in ("B-", "I-") and name[2:].strip()):
            raise InputError(
                f"task.labels has {name!r}, which is not an IOB2 tag; give types, e.g. A0,A1, or O "
                "with the B- and I- tag of each type"
            )
    return labels


def _fit_tags(task: Task) -> Task:
    """Fills in the tags of a tagging task from its types. Raises InputError for a misfit."""
    if task.scheme == NO_SCHEME:
        if task.predicate or task.metric in ("entity_f1", "role_f1"):
            name = "predicate" if task.predicate else "metric"
            raise InputError(
                f"task.{name}={getattr(task, name)} needs tags that span words, but "
                "task.scheme=none means that each tag is for one word; remove one of the two"
            )
        if len(set(task.labels)) < len(task.labels) or len(task.labels) == 1:
            raise InputError(f"task.labels={','.join(task.labels)} must be 2 or more distinct tags")
        return task
    if task.metric == "accuracy":
        raise InputError(
            "task.metric=accuracy counts words, most of which are O if tags span words; use "
            "entity_f1, which reports the accuracy too, or task.scheme=none"
        )
    if not task.labels:
        return task
    labels = task.labels if OUTSIDE in task.labels else iob2_labels(task.labels)
    return dataclasses.replace(task, labels=_iob2(labels))


def check_task(task: Task) -> Task:
    """Fills in a task's defaults. Raises InputError if its parts do not fit together."""
    _check_fields(task)
    _check_answer(task)
    check_entities(task)
    check_candidates(task)
    check_predicate(task)
    check_positive(task)
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
    if task.kind == "texts":
        check_column(task, "target", "generates text", ("labels", "words", "choices"))
    elif task.kind == "spans":
        check_column(task, "answers", "extracts spans", ("labels", "words", "choices"))
    elif task.kind == "numbers":
        check_column(task, "number", "predicts a number", ("labels", "words", "choices"))
        if task.limits and (len(task.limits) != 2 or not task.limits[0] < task.limits[1]):
            raise InputError(
                f"task.limits={task.limits!r} must be the minimum and the maximum, e.g. (0, 5)"
            )
    elif task.kind == "tags":
        check_column(task, "tags", "tags words", ("words", "choices"))
        if len(task.fields) != 1:
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
    if len(set(task.labels)) < len(task.labels) or len(task.labels) == 1:
        raise InputError(f"task.labels={','.join(task.labels)} must be 2 or more distinct classes")
    words = [word for group in task.words for word in group]
    if not all(name.strip() for name in (*task.labels, *words)):
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


def check_positive(task: Task) -> None:
    """Raises InputError if the positive class of binary metrics is not a class of the task."""
    if not task.positive:
        return
    if task.kind != "classes" or task.choices:
        raise InputError(
            f"task.positive={task.positive!r} is only valid for classes, but the task has "
            f"{'choices' if task.choices else task.kind}; remove it"
        )
    if task.labels and task.positive not in task.labels:
        raise InputError(
            f"task.positive={task.positive!r} is not a class of task {task.name}; "
            f"{nearest(task.positive, task.labels)}"
        )
