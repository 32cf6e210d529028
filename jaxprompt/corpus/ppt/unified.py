"""Downstream tasks in the form of a pre-training task (Gu et al. 2022, sections 3.2 and 3.3)."""

import dataclasses
import re
from collections.abc import Sequence

from jaxprompt.corpus.ppt.patterns import PATTERNS, Pattern, fields
from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.template import parse
from jaxprompt.errors import InputError

_MASK = "[mask]"
# The words of pairs in the order in which the unified form lists them as options: no, maybe, yes
# (section 3.3; the released data_utils/downstream/CBDatasets.py has the same order).
_LISTED = {style["nsp"].words for style in PATTERNS.values()}


def ask(
    task: Task, name: str, pattern: Pattern, *, texts: Sequence[str] = (), query: str = ""
) -> Task:
    """Lays out a task by the pattern of the pre-training task `name`; for selections see `unify`.

    `texts`, for nsp and cls, are the fields that are used, in order; () = those of the task. The
    words of the classes stay the task's, written in the form of the pre-training ones. Raises
    InputError if the number of texts does not match the pattern.
    """
    if name in ("nss", "unified"):
        return unify(task, pattern, query)
    if task.is_text or task.choices:
        what = "generates text" if task.is_text else "has choices"
        raise InputError(
            f"task.form={name} needs classes, but task {task.name} {what}; use task.form=cloze"
        )
    if query:
        raise InputError(
            f"task.template={query!r} is not used with task.form={name}, whose layout is in "
            "ppt.patterns; leave it empty, or use task.form=cloze"
        )
    own, wanted = tuple(texts) or task.fields, fields(name)
    if len(own) != len(wanted):
        raise InputError(
            f"task.form={name} needs {len(wanted)} texts, but task {task.name} has {len(own)} "
            f"({', '.join(own)}); list {len(wanted)} in task.fields"
        )
    # The pattern's texts are called by the pre-training task, and get the task's own columns.
    named = dict(zip(wanted, own, strict=True))
    template = re.sub(r"\{(\w+)\}", lambda found: f"{{{named[found[1]]}}}", pattern.text())
    return _laid_out(task, template, pattern)


def unify(task: Task, pattern: Pattern, query: str = "") -> Task:
    """Lays out a task by the pattern of a selection, nss or the unified task.

    A task of classes offers the first label word of each, no before maybe before yes and others in
    the order of the classes; a task of choices offers those of each row. The label words are the
    pattern's names of options. The question is `query`, else the task's query, else its fields: one
    and a question mark; two as in "a? b."; or all of them joined. Raises InputError for a task that
    generates text or has more classes than there are names.
    """
    if task.is_text:
        raise InputError(
            f"task.form=unified selects among options, but task {task.name} generates text; use "
            "task.form=cloze"
        )
    most, names = len(pattern.words), task.labels
    if len(names) > most:
        raise InputError(
            f"task.form=unified has names for {most} options, but task {task.name} has "
            f"{len(names)} classes; use task.form=cloze"
        )
    before, _, behind = pattern.around
    asked = _check(query) if query else task.query or _fields(task, pattern)
    # A query ends with its own mark, which a pattern has too.
    template = f" {before}{asked}{{choices}}{behind}"
    words = [] if task.choices else [group[0] for group in task.words]
    order = _order(words) or range(len(names) or most)
    # A class is named by the letter or numeral of its option.
    names_by_class = dict(zip(order, pattern.words, strict=False))
    task = dataclasses.replace(
        task, options=tuple(words[i] for i in order if words),
        words=tuple((names_by_class[i],) for i in sorted(names_by_class)), targets=(),
    )  # fmt: skip
    return _laid_out(task, template, pattern)


def _order(words: Sequence[str]) -> list[int]:
    """Lists the class indices in the order of their options."""
    for listed in _LISTED:
        if {word.lower() for word in words} <= set(listed):
            return sorted(range(len(words)), key=lambda i: listed.index(words[i].lower()))
    return list(range(len(words)))


def _laid_out(task: Task, template: str, pattern: Pattern) -> Task:
    until = template.index(_MASK) + len(_MASK)
    # A left-to-right model does without what stands behind the mask, unless that is a text.
    causal = template if "{" in template[until:] else template[:until]
    return dataclasses.replace(
        task, template=template, causal=causal, causal_words=(), option=pattern.option,
        spaced=pattern.space, widest=pattern.words,
    )  # fmt: skip


def _fields(task: Task, pattern: Pattern) -> str:
    _, mark, _ = pattern.around
    texts = [f"{{{field}}}" for field in task.fields]
    if len(texts) == 2 and not task.choices:
        return f"{texts[0]}{mark} {texts[1]}{pattern.option[-1]}"  # ends as an option does
    return " ".join(texts) + mark


def _check(query: str) -> str:
    kinds = {part.kind for part in parse(query).parts}
    if found := kinds & {"mask", "choice", "choices"}:
        raise InputError(
            f"task.template={query!r} has {', '.join(sorted(found))}; with task.form=unified write "
            f"only the text before the options, e.g. '{{premise}}? {{hypothesis}}.'"
        )
    return query
