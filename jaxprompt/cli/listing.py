"""Helpers of the commands that list things: tables of names, and the fields of one of them."""

import ast
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxprompt.api.signatures import choice_names
from jaxprompt.cli import print_text
from jaxprompt.cli.options import Parser
from jaxprompt.config.blocks import make_preset_block, part_of
from jaxprompt.config.load import read_config
from jaxprompt.config.open_blocks import OPEN, block_names, declared_fields
from jaxprompt.errors import InputError, nearest
from jaxprompt.registry import PACKAGE, Registry


def read_name(doc: str, argv: Sequence[str], kind: str) -> str | None:
    """Parses the flags of a command that lists things. Returns the name to show, None = all."""
    parser = Parser(f"{kind}s", doc, config=False)
    parser.add_argument("name", nargs="?", help=f"the {kind} to show (default: list them all)")
    return parser.read(argv)[0].name


def choose_name(kind: str, name: str, names: Iterable[str]) -> str:
    """Returns `name` if it is known. Raises InputError with the nearest names otherwise."""
    names = list(names)
    if name not in names:
        raise InputError(f"unknown {kind} {name!r}; {nearest(name, names)}")
    return name


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


def print_block(doc: str, argv: Sequence[str], kind: str, block: str) -> int:
    """Runs the command that lists the methods or heads, or shows one of them. Exit code 0."""
    name, names = read_name(doc, argv, kind), choice_names(block)
    if name:
        print_text(show_block(block, choose_name(kind, name, names)))
    else:
        print_text(columns((name, first_line(block, name)) for name in names))
    return 0


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
