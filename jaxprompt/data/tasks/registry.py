"""Built-in and custom tasks: sources of rows, their columns, and the templates of their texts.

A task is data. Its templates use a small syntax:

    {premise}            the text of a field
    {premise|chop}       without its last character
    {hypothesis|lower}   with its first letter in lower case
    {question|whole}     never truncated: other fields are truncated instead
    [mask] [sep]         the scored position; the separator of the backbone
    {predicate}          the word whose roles are tagged
    {choice} {choices}   the choice of this row of the input; all choices, each with its name
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxprompt.data.tasks.checks import check_task
from jaxprompt.data.tasks.conversation import MESSAGES
from jaxprompt.data.tasks.definitions.chinese import CHINESE
from jaxprompt.data.tasks.definitions.english import ENGLISH
from jaxprompt.data.tasks.definitions.relations import RELATIONS
from jaxprompt.data.tasks.definitions.sequences import SEQUENCES
from jaxprompt.data.tasks.tags import NO_SCHEME
from jaxprompt.data.tasks.task import PREDICATE, Task
from jaxprompt.errors import InputError, first_line, nearest
from jaxprompt.registry import Registry

TASKS = Registry("tasks", "task", values=ENGLISH | CHINESE | RELATIONS | SEQUENCES)


def task_names() -> tuple[str, ...]:
    """Returns the names of all built-in tasks and those of installed packages, sorted."""
    return tuple(TASKS.names())


def get_task(name: str) -> Task:
    """Returns the built-in or installed task `name`.

    Raises InputError with the nearest names if there is none.
    """
    if name not in task_names():
        suggestion = nearest(name, task_names())
        raise InputError(f"unknown task {name!r}; {suggestion}; for your data use task.name=custom")
    plugin = TASKS.plugin(name)
    try:
        return check_task(Task(name=name, **TASKS.load(name)))
    except (InputError, TypeError, AttributeError) as error:  # fields that are unknown, or no texts
        if plugin is None:
            raise
        raise InputError(
            f"task {name!r} of package {plugin} is invalid: {first_line(error)}"
        ) from error


def custom_task(
    *,
    fields: Sequence[str],
    words: Sequence[str | Sequence[str]] = (),
    name: str = "custom",
    **columns: Any,
) -> Task:
    """Makes a task from the user's columns.

    Without `labels` the classes are read from the training rows (`with_labels`). With `choices` the
    answer is an index, a letter or the text of a choice, and `words` are the names of the choices,
    by default letters. A column `target` holds a text or a list of equally good texts. Columns
    `messages` hold conversations, and then there are no fields. A column
    `answers` holds {"text": [...], "answer_start": [...]}, spans of the last field. A column `tags`
    has one tag per word of the only field, in the given `scheme` or the one detected ("none": each
    tag is for one word); with `predicate` they are the roles of that word (readers/predicates.py).
    With `entities` the classes are relations between them (readers/entities.py), with `question`
    examples are answers to questions (readers/candidates.py).

    Args:
      fields: columns of the texts.
      words: label words of each class, one or several; by default a verbalizer uses the class
        names. The target text of a class is its first word.
      name: name of the task.
      **columns: fields of `Task`. Without `plain` the texts are joined by separators; without
        `metric` the default depends on the kind of answer.

    Raises:
      InputError: if these do not fit together.
    """
    columns = {key: tuple(x) if isinstance(x, list) else x for key, x in columns.items()}
    columns["labels"] = tuple(str(x) for x in columns.get("labels", ()))
    groups = tuple((w,) if isinstance(w, str) else tuple(w) for w in words)
    targets = tuple(group[0] for group in groups if group)
    if columns.get("messages"):
        if fields:
            raise InputError(
                f"task.messages={','.join(columns['messages'])} and task.fields="
                f"{','.join(fields)} are both set, but a conversation is the whole input; remove "
                "one of the two"
            )
        fields = (MESSAGES,)
    task = Task(name=name, fields=tuple(fields), words=groups, targets=targets, **columns)
    texts = [f"{{{column}}}" for column in fields]
    if task.entities and texts:
        texts[0] = f"{{{fields[0]}|marked}}"
    if task.answers:  # only the last field is divided into windows
        texts = [f"{{{column}|whole}}" for column in fields[:-1]] + texts[-1:]
    named_texts = texts if len(texts) == 1 else [f"{column}: {{{column}}}" for column in fields]
    plain_texts = list(texts)
    if task.choices:
        named_texts = [*named_texts, "choices: {choices}"]
        plain_texts.append("{choice}")
    if task.predicate:
        plain_texts.append(f"{{{PREDICATE}}}")
    task = dataclasses.replace(
        task,
        template=task.template or _relation_template(texts, task.entities),
        text=" ".join(named_texts),
        plain=task.plain or " [sep] ".join(plain_texts),
        metric=columns.get("metric") or _default_metric(task),
    )
    return check_task(task)


def _default_metric(task: Task) -> str:
    """Returns the default metric of a custom task."""
    if task.is_text:
        return "exact_match"
    if task.tags and task.scheme != NO_SCHEME:
        return "role_f1" if task.predicate else "entity_f1"
    if task.answers:
        return "f1"
    return "pearson" if task.number else "accuracy"


def _relation_template(texts: Sequence[str], entities: Sequence[str]) -> str:
    """Returns the template that asks for the relation of two entities (DART, appendix A.2)."""
    if len(entities) != 2:
        return ""
    return f"{' '.join(texts)} {{entity1}} is the [mask] of {{entity2}}"
