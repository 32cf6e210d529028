"""The commands that list the methods, heads, backbones or tasks, or show one of them."""

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxprompt.api.signatures import choice_names
from jaxprompt.cli import Command, print_text
from jaxprompt.cli.options import Parser
from jaxprompt.config.blocks import make_preset_block, part_of
from jaxprompt.config.load import read_config
from jaxprompt.config.open_blocks import OPEN, block_names, declared_fields
from jaxprompt.data.sources.splits import is_shipped
from jaxprompt.data.tasks.registry import TASKS, get_task, task_names
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError, nearest
from jaxprompt.planning.published import PublishedCheckpoint, published_checkpoints
from jaxprompt.registry import BACKBONES, PACKAGE, Registry


class Listing(NamedTuple):
    """One command."""

    description: str
    names: Callable[[], Sequence[str]]  # that it can show
    table: Callable[[], str]  # of all
    show: Callable[[str], str]  # the description of one


def list_or_show(command: str, argv: Sequence[str]) -> int:
    """Prints the table of a command, or what it shows of one name. Exit code 0."""
    listing, kind = LISTINGS[command], command.removesuffix("s")
    parser = Parser(command, listing.description, config=False)
    parser.add_argument("name", nargs="?", help=f"the {kind} to show (default: list them all)")
    name = parser.read(argv)[0].name
    if name and name not in (names := listing.names()):
        raise InputError(f"unknown {kind} {name!r}; {nearest(name, names)}")
    print_text(listing.show(name) if name else listing.table())
    return 0


def columns(rows: Iterable[Sequence[object]]) -> str:
    """Formats rows of cells in aligned columns; the last column is not padded."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False))
        for row in texts
    ]
    return "\n".join(f"{line}  {row[-1]}".strip() for line, row in zip(lines, texts, strict=True))


def pairs(values: Mapping[str, Any]) -> str:
    """Formats values by name, one per line, without the empty ones."""
    return columns((name, value) for name, value in values.items() if value not in ("", (), None))


# -- methods and heads ----------------------------------------------------------------------------


def _block_listing(command: str, block: str) -> Listing:
    return Listing(
        f"Lists the {command}, or shows one with its fields.",
        partial(choice_names, block),
        lambda: columns((name, first_line(block, name)) for name in choice_names(block)),
        partial(show_block, block),
    )


def show_block(block: str, name: str) -> str:
    """Returns the description of a method or head, and its fields with their defaults."""
    part = getattr(part_of(block), name, None)
    lines = [f"{name}: {first_line(block, name)}"]
    if name in block_names(block):
        values = make_preset_block(block, name, read_config("base"))
        fields = declared_fields(block, name).items()
        rows = [(f"{block}.{key} = {values[key]!r}", field.note) for key, field in fields]
        lines += ["", columns(rows)] if rows else []
        flag = f"--config.{block}.name={name}"
    else:
        flag = f"--config=base:{name}"
    lines += ["", f"config: {flag}", f"Python: jp.{name}{_arguments(part)}"]
    return "\n".join(lines)


def first_line(block: str, name: str) -> str:
    """Returns the first line of the docstring of a method or head; python -OO has none."""
    function = getattr(part_of(block), name, None)
    if function is not None and function.__doc__:
        return function.__doc__.splitlines()[0]
    return registered_line(OPEN[block], name) if name in block_names(block) else ""


def registered_line(registry: Registry, name: str) -> str:
    """Returns the first docstring line of a registered name.

    Files of this package are not imported; for a package that cannot be imported it is the error.
    """
    plugin = registry.plugin(name)
    if plugin is None:
        return _docstring_line(PACKAGE / registry.package / f"{name}.py")
    try:
        line, *_ = (registry.load(name).__doc__ or "").splitlines() or [""]
    except InputError as error:
        return f"unusable: {error}"
    return f"{line} ({plugin})".lstrip()


def _docstring_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()[0]


def _arguments(part: Any) -> str:
    if part is None:
        return "()"
    _, *parameters = inspect.signature(part).parameters.values()
    return f"({', '.join(map(str, parameters))})"


# -- tasks ----------------------------------------------------------------------------------------


def _task_table() -> str:
    titles = ("task", "answers", "metric", "columns", "source")
    return columns([titles, *map(_task_row, task_names())])


def _task_row(name: str) -> tuple[str, ...]:
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


def _answers(task: Task) -> str:
    if task.kind != "classes":
        return task.kind
    return f"{len(task.labels)} classes" if task.labels else "choices"


def _source(task: Task) -> str:
    plugin = TASKS.plugin(task.name)
    suffix = f" ({plugin})" if plugin else ""
    if task.hub:
        return f"hub:{task.hub}{f':{task.subset}' if task.subset else ''}{suffix}"
    return ("package" if is_shipped(task) else "your files") + suffix


# -- backbones ------------------------------------------------------------------------------------


def _backbone_names() -> list[str]:
    return [*BACKBONES.names(), *published_checkpoints()]


def _backbone_table() -> str:
    return columns((family, registered_line(BACKBONES, family)) for family in BACKBONES.names())


def format_backbone(name: str) -> str:
    """Returns the description of a family, or the sizes of a published checkpoint."""
    checkpoints = published_checkpoints()
    if name in checkpoints:
        path = {"path": f"--config.backbone.path={name}"}
        return pairs({"backbone": name} | _sizes(checkpoints[name]) | path)
    text = f"{name}: {registered_line(BACKBONES, name)}"
    sizes = {
        path: _sizes(checkpoint)
        for path, checkpoint in checkpoints.items()
        if "/" in path and family_of_checkpoint(checkpoint) == name
    }
    if not sizes:
        return text
    titles = ["published as", *next(iter(sizes.values()))]
    return f"{text}\n\n{columns([titles, *([path, *x.values()] for path, x in sizes.items())])}"


def family_of_checkpoint(checkpoint: PublishedCheckpoint) -> str:
    """Returns the family of a published checkpoint."""
    from jaxprompt.build.backbone import model_family

    return model_family(checkpoint.hf["model_type"])


def _sizes(checkpoint: PublishedCheckpoint) -> dict[str, object]:
    hf = checkpoint.hf.get("encoder", checkpoint.hf)  # T5Gemma has a block for each part

    def first(*names: str) -> object:
        return next((hf[name] for name in names if name in hf), "")

    return {
        "width": first("hidden_size", "d_model", "n_embd", "dim"),
        "layers": first("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"),
        "heads": first(
            "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"
        ),
        "vocabulary": hf["vocab_size"],
        "positions": first("max_position_embeddings", "n_positions", "max_sequence_length")
        or "relative",
        "heads in checkpoint": ", ".join(checkpoint.heads),
    }


LISTINGS = {
    "methods": _block_listing("methods", "prompt"),
    "heads": _block_listing("heads", "head"),
    "backbones": Listing(
        "Lists the backbone families, or shows one with its published checkpoints and their sizes.",
        _backbone_names,
        _backbone_table,
        format_backbone,
    ),
    "tasks": Listing(
        "Lists the known tasks, or shows one: its columns, labels, words, templates and source.",
        task_names,
        _task_table,
        format_task,
    ),
}
COMMANDS = {
    name: Command(listing.description, partial(list_or_show, name))
    for name, listing in LISTINGS.items()
}
