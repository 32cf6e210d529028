"""Any task as a selection among options, answered by a letter (Gu et al. 2022, section 3.3)."""

import dataclasses

from jaxprompt.data.ppt.patterns import Pattern
from jaxprompt.data.tasks import Task
from jaxprompt.data.template import parse
from jaxprompt.errors import InputError


def unify(task: Task, pattern: Pattern, query: str = "") -> Task:
    """Lays a task out by a pattern of the pre-training task `unified`.

    A task of classes offers their first label words in the order of the classes, one of choices
    what each row has; the label words are the pattern's letters. What is asked is `query`, else the
    task's own, else its fields: one and a question mark; two as in "a? b."; or all in a row. Raises
    InputError for a task that writes text or has more classes than there are letters.
    """
    if task.is_text:
        raise InputError(
            f"task.form=unified selects among options, task {task.name} writes text; take "
            "task.form=cloze"
        )
    most, names = len(pattern.words), task.labels
    if len(names) > most:
        raise InputError(
            f"task.form=unified has letters for {most} options, task {task.name} has {len(names)} "
            "classes; take task.form=cloze"
        )
    _, behind = pattern.around
    asked = _check(query) if query else task.query or _fields(task, pattern)
    template = f" {asked}{{choices}}{behind}"
    mask = "[mask]"
    return dataclasses.replace(
        task, template=template, causal=template[: template.index(mask) + len(mask)],
        options=() if task.choices else tuple(group[0] for group in task.words),
        words=tuple((word,) for word in pattern.words[: len(names) or most]), causal_words=(),
        targets=(), option=pattern.option, spaced=pattern.space,
    )  # fmt: skip


def _fields(task: Task, pattern: Pattern) -> str:
    mark, _ = pattern.around
    texts = [f"{{{field}}}" for field in task.fields]
    if len(texts) == 2 and not task.choices:
        return f"{texts[0]}{mark} {texts[1]}{pattern.option[-1]}"  # ends as an option does
    return " ".join(texts) + mark


def _check(query: str) -> str:
    kinds = {part.kind for part in parse(query).parts}
    if found := kinds & {"mask", "choice", "choices"}:
        raise InputError(
            f"task.template={query!r} has {', '.join(sorted(found))}; with task.form=unified give "
            "what stands before the options alone, as in '{premise}? {hypothesis}.'"
        )
    return query
