"""Lists the known tasks, or shows one: its columns, labels, words, templates and source."""

from collections.abc import Sequence
from typing import Any

from jaxprompt.cli import print_text
from jaxprompt.cli.listing import choose_name, columns, pairs, read_name
from jaxprompt.data.sources.splits import is_shipped
from jaxprompt.data.tasks.registry import TASKS, get_task, task_names
from jaxprompt.errors import InputError


def main(argv: Sequence[str]) -> int:
    """Prints all tasks or one of them. Exit code 0."""
    name = read_name(__doc__, argv, "task")
    if name:
        print_text(format_task(choose_name("task", name, task_names())))
        return 0
    titles = ("task", "answers", "metric", "columns", "source")
    print_text(columns([titles, *map(_row, task_names())]))
    return 0


def _row(name: str) -> tuple[str, ...]:

    try:
        task = get_task(name)
    except InputError as error:  # of a package that cannot be used
        return name, "", "", "", f"unusable: {error}"
    return name, _answers(task), task.metric, ", ".join(task.fields), _source(task)


def format_task(name: str) -> str:
    """Returns the description of a task."""
    task = get_task(name)
    words = ["|".join(alternatives) for alternatives in task.words]
    return pairs(
        {
            "task": task.name,
            "answers": _answers(task),
            "columns": ", ".join(task.fields),
            "entities": ", ".join(task.entities),
            "predicate": task.predicate,
            "label": task.target or task.answers or task.tags or task.number or task.label,
            "labels": ", ".join(task.labels),
            "label words": ", ".join(words),
            "template": task.template,
            "GPT-2 template": task.causal,
            "text form": task.text,
            "linear": task.plain,
            "no relation": task.negative,
            "question": ", ".join(task.question),
            "candidates": ", ".join(task.candidates),
            "metric": task.metric,
            "source": _source(task),
            "splits": ", ".join(f"{split} = {name}" for split, name in task.splits.items()),
            "config": f"--config.task.name={task.name}",
        }
    )


def _answers(task: Any) -> str:
    if task.kind != "classes":
        return task.kind
    return f"{len(task.labels)} classes" if task.labels else "choices"


def _source(task: Any) -> str:

    plugin = TASKS.plugin(task.name)
    suffix = f" ({plugin})" if plugin else ""
    if task.hub:
        return f"hub:{task.hub}{f':{task.subset}' if task.subset else ''}{suffix}"
    return ("package" if is_shipped(task) else "your files") + suffix
