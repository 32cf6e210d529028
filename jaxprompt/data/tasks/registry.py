"""The known tasks and the user's own: where rows are, which columns count, how texts are laid out.

A task is data. Its texts are written in a small string form:

    {premise}            the text of a field
    {premise|chop}       without its last character
    {hypothesis|lower}   its first letter in lower case
    {question|whole}     never cut: what does not fit is taken from other fields
    [mask] [sep]         the scored position; the separator of the backbone
    {predicate}          the word whose roles are tagged
    {choice} {choices}   the choice of this row of the input; all choices, each by its name
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxprompt.data.tasks.checks import check_task
from jaxprompt.data.tasks.definitions.chinese import CHINESE
from jaxprompt.data.tasks.definitions.english import ENGLISH
from jaxprompt.data.tasks.definitions.relations import RELATIONS
from jaxprompt.data.tasks.definitions.sequences import SEQUENCES
from jaxprompt.data.tasks.tags import NO_SCHEME
from jaxprompt.data.tasks.task import PREDICATE, Task
from jaxprompt.errors import InputError, nearest

_ALL = ENGLISH | CHINESE | RELATIONS | SEQUENCES


def task_names() -> tuple[str, ...]:
    """Names of the known tasks, sorted."""
    return tuple(sorted(_ALL))


def get_task(name: str) -> Task:
    """The known task `name`. Raises InputError with the nearest names for an unknown one."""
    if name not in _ALL:
        raise InputError(
            f"unknown task {name!r}; {nearest(name, _ALL)}; or task.name=custom for your own file"
        )
    return check_task(Task(name=name, **_ALL[name]))


def task_from_json(values: Mapping[str, Any]) -> Task:
    """Rebuilds a task from `dataclasses.asdict` of it, which may have been through JSON.

    Raises InputError where its parts do not fit each other.
    """
    task = Task(**{part.name: _tuples(values[part.name]) for part in dataclasses.fields(Task)})
    check_task(task)
    return task


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def custom_task(
    *,
    fields: Sequence[str],
    label: str = "label",
    labels: Sequence[str] = (),
    template: str = "",
    words: Sequence[str | Sequence[str]] = (),
    plain: str = "",
    target: str = "",
    tags: str = "",
    predicate: str = "",
    answers: str = "",
    scheme: str = "",
    metric: str = "",
    positive: str = "",
    choices: Sequence[str] = (),
    option: str = "",
    spaced: bool = True,
    entities: Sequence[str] = (),
    offsets: str = "tags",
    markers: Sequence[str] = (),
    negative: str = "",
    question: Sequence[str] = (),
    candidate: str = "",
    candidates: Sequence[str] = (),
    placeholder: str = "",
    number: str = "",
    limits: Sequence[float] = (),
    name: str = "custom",
) -> Task:
    """A task from the user's own columns.

    Without `labels` the classes are found in the training rows (`with_labels`). Without `words`
    a verbalizer uses the class names; the target text of a class is its first word. Without `plain`
    the fields are joined by separators. With `choices` the answer is an index, a letter or the text
    of a choice, and `words` name them, the letters where there are none; `option` says how one is
    written. With `target`, the column of a text or of a list of equally good texts, the task is to
    write it, and there are no classes. Without `metric` a task is measured by accuracy, or by
    exact_match where it writes text. With `answers`, a column of {"text": [...], "answer_start":
    [...]}, the answer is a span of the last field. With `tags`, a column of lists, every word of
    the one field, a list or a text with spaces between its words, has a tag, in the given `scheme`
    or that found ("none": each tag is of one word, and the metric is accuracy); with `predicate`,
    the column of the index of a word, they are the roles of that word (readers/predicates.py).
    With `entities`, which stand in the first field as `offsets` says, the classes are relations
    between them (readers/entities.py); without `words` a relation has those of its name, and
    without `plain` and `template` words stand around the entities. With `question` examples are
    answers of questions (readers/candidates.py). With `number`, a column of numbers, the task is
    to predict it; it lies within `limits`, the least and the greatest, if any. `positive` is the
    positive class of f1 and of the metrics of questions, the second by default.
    """
    groups = tuple((w,) if isinstance(w, str) else tuple(w) for w in words)
    of_tags = "accuracy" if scheme == NO_SCHEME else "role_f1" if predicate else "entity_f1"
    measured = ((target, "exact_match"), (tags, of_tags), (answers, "f1"), (number, "pearson"))
    texts = [f"{{{column}}}" for column in fields]
    if entities and texts:
        texts[0] = f"{{{fields[0]}|marked}}"
    if answers:  # the last field alone is cut into windows
        texts = [f"{{{column}|whole}}" for column in fields[:-1]] + texts[-1:]
    behind = ["{choice}"] * bool(choices) + [f"{{{PREDICATE}}}"] * bool(predicate)
    named = texts if len(texts) == 1 else [f"{column}: {{{column}}}" for column in fields]
    task = Task(
        name=name,
        fields=tuple(fields),
        label=label,
        labels=tuple(str(x) for x in labels),
        choices=tuple(choices),
        template=template or _relation_template(texts, entities),
        words=groups,
        option=option,
        spaced=spaced,
        text=" ".join(named + ["choices: {choices}"] * bool(choices)),
        targets=tuple(group[0] for group in groups if group),
        plain=plain or " [sep] ".join(texts + behind),
        target=target,
        tags=tags,
        predicate=predicate,
        answers=answers,
        scheme=scheme,
        entities=tuple(entities),
        offsets=offsets,
        markers=tuple(markers),
        negative=negative,
        question=tuple(question),
        candidate=candidate,
        candidates=tuple(candidates),
        placeholder=placeholder,
        number=number,
        limits=tuple(limits),
        positive=positive,
        metric=metric or next((m for given, m in measured if given), "accuracy"),
    )
    return check_task(task)


def _relation_template(texts: Sequence[str], entities: Sequence[str]) -> str:
    """Asks for the relation of two entities (DART, appendix A.2)."""
    if len(entities) != 2:
        return ""
    return f"{' '.join(texts)} {{entity1}} is the [mask] of {{entity2}}"
