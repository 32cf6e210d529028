"""Downstream tasks in the form of a pre-training task (Gu et al. 2022, sections 3.2 and 3.3)."""

import dataclasses
import re
from collections.abc import Sequence

from jaxprompt.corpus.ppt.patterns import PATTERNS, Pattern, text_fields
from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.template import parse
from jaxprompt.errors import InputError

_MASK = "[mask]"
# The label words of pairs in the order of the options in the unified form: no, maybe, yes
# (section 3.3; the released data_utils/downstream/CBDatasets.py has the same order).
_PAIR_WORDS = {style["nsp"].words for style in PATTERNS.values()}


def to_pretraining_form(
    task: Task, name: str, pattern: Pattern, *, texts: Sequence[str] = (), query: str = ""
) -> Task:
    """Returns a task with the pattern of the pre-training task `name`.

    `texts`, for nsp and cls, are the fields that are used, in order; () = those of the task. The
    label words stay the task's, written in the form of the pre-training ones. For selections see
    `to_selection_form`. Raises InputError if the number of texts does not match the pattern.
    """
    if name in ("nss", "unified"):
        return to_selection_form(task, pattern, query)
    if task.is_text or task.choices:
        answers = "generates text" if task.is_text else "has choices"
        raise InputError(
            f"task.form={name} needs classes, but task {task.name} {answers}; use task.form=cloze"
        )
    if query:
        raise InputError(
            f"task.template={query!r} is not used with task.form={name}, whose layout is in "
            "ppt.patterns; leave it empty, or use task.form=cloze"
        )
    columns, fields = tuple(texts) or task.fields, text_fields(name)
    if len(columns) != len(fields):
        raise InputError(
            f"task.form={name} needs {len(fields)} texts, but task {task.name} has {len(columns)} "
            f"({', '.join(columns)}); list {len(fields)} in task.fields"
        )
    column_of = dict(zip(fields, columns, strict=True))
    template = re.sub(r"\{(\w+)\}", lambda match: f"{{{column_of[match[1]]}}}", pattern.text())
    return _with_template(task, template, pattern)


def to_selection_form(task: Task, pattern: Pattern, query: str = "") -> Task:
    """Returns a task with the pattern of a selection, nss or the unified task.

    The options of a task with classes are the first label word of each, no before maybe before yes
    and others in the order of the classes; those of a task with choices are the choices of each
    row. The label words are the pattern's names of options. The question is `query`, else the
    task's query, else its fields: one and a question mark; two as in "a? b."; or all of them
    joined. Raises InputError for a task that generates text or has more classes than there are
    names.
    """
    if task.is_text:
        raise InputError(
            f"task.form=unified selects among options, but task {task.name} generates text; use "
            "task.form=cloze"
        )
    max_options, labels = len(pattern.words), task.labels
    if len(labels) > max_options:
        raise InputError(
            f"task.form=unified has names for {max_options} options, but task {task.name} has "
            f"{len(labels)} classes; use task.form=cloze"
        )
    if query:
        _check_query(query)
    before, _, after = pattern.fixed_texts
    # The pattern's question mark is part of the query.
    template = f" {before}{query or task.query or _default_query(task, pattern)}{{choices}}{after}"
    words = [] if task.choices else [group[0] for group in task.words]
    order = _option_order(words) or range(len(labels) or max_options)
    # The label word of a class is the letter or numeral of its option.
    word_of = dict(zip(order, pattern.words, strict=False))
    task = dataclasses.replace(
        task,
        options=tuple(words[i] for i in order if words),
        words=tuple((word_of[i],) for i in sorted(word_of)),
        targets=(),
    )
    return _with_template(task, template, pattern)


def _option_order(words: Sequence[str]) -> list[int]:
    """Lists the class indices in the order of their options."""
    for listed in _PAIR_WORDS:
        if {word.lower() for word in words} <= set(listed):
            return sorted(range(len(words)), key=lambda i: listed.index(words[i].lower()))
    return list(range(len(words)))


def _with_template(task: Task, template: str, pattern: Pattern) -> Task:
    mask_end = template.index(_MASK) + len(_MASK)
    # A causal model needs nothing after the mask, unless that contains a text.
    causal = template if "{" in template[mask_end:] else template[:mask_end]
    return dataclasses.replace(
        task,
        template=template,
        causal=causal,
        causal_words=(),
        option=pattern.option,
        spaced=pattern.space,
        widest=pattern.words,
    )


def _default_query(task: Task, pattern: Pattern) -> str:
    _, mark, _ = pattern.fixed_texts
    texts = [f"{{{field}}}" for field in task.fields]
    if len(texts) == 2 and not task.choices:
        return f"{texts[0]}{mark} {texts[1]}{pattern.option[-1]}"  # ends as an option does
    return " ".join(texts) + mark


def _check_query(query: str) -> None:
    kinds = {part.kind for part in parse(query).parts}
    if invalid := kinds & {"mask", "choice", "choices"}:
        raise InputError(
            f"task.template={query!r} has {', '.join(sorted(invalid))}; with task.form=unified "
            f"write only the text before the options, e.g. '{{premise}}? {{hypothesis}}.'"
        )
