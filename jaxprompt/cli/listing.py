"""What the commands that list things share: a table of names, and the fields of one of them."""

import ast
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxprompt.api.choices import known
from jaxprompt.cli.options import Parser
from jaxprompt.config.blocks import make_block, part_of
from jaxprompt.config.load import read_config
from jaxprompt.config.open_blocks import OPEN, declared, names
from jaxprompt.errors import InputError, nearest
from jaxprompt.registry import PACKAGE, Registry


def read_name(doc: str, argv: Sequence[str], what: str) -> str | None:
    """Parses the flags of such a command. -> the name that is asked for, None = all"""
    parser = Parser(f"{what}s", doc, config=False)
    parser.add_argument("name", nargs="?", help=f"the {what} to show (default: list them all)")
    args, overrides = parser.read(argv)
    if overrides:
        raise InputError(f"this command takes no --config; see {what}s --help")
    return args.name


def choose_name(what: str, name: str, names: Iterable[str]) -> str:
    """Returns the name. Raises InputError with the nearest ones for an unknown one."""
    names = list(names)
    if name not in names:
        raise InputError(f"unknown {what} {name!r}; {nearest(name, names)}")
    return name


def columns(rows: Iterable[Sequence[object]]) -> str:
    """Lays rows of cells out in columns; the last one takes what it needs."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False))
        for row in texts
    ]
    return "\n".join(f"{line}  {row[-1]}".strip() for line, row in zip(lines, texts, strict=True))


def pairs(values: Mapping[str, Any]) -> str:
    """Writes what is known by its names, a line each; what is empty is left out."""
    return columns((name, value) for name, value in values.items() if value not in ("", (), None))


# -- methods and heads ----------------------------------------------------------------------------


def list_block(block: str) -> str:
    """Lists the methods or heads with a line on each."""
    return columns((name, first_line(block, name)) for name in known(block))


def show_block(block: str, name: str) -> str:
    """Shows one: what it is, and its fields with their defaults."""
    part = getattr(part_of(block), name, None)
    lines = [f"{name}: {first_line(block, name)}"]
    if name in names(block):
        made = make_block(block, name, read_config("base"))
        fields = declared(block, name).items()
        rows = [(f"{block}.{part} = {made[part]!r}", field.note) for part, field in fields]
        lines += ["", columns(rows)] if rows else []
        how = f"--config.{block}.name={name}"
    else:
        how = f"--config=base:{name}"
    lines += ["", f"config: {how}", f"Python: jp.{name}{_arguments(part)}"]
    return "\n".join(lines)


def first_line(block: str, name: str) -> str:
    """Reads the first line of what a method or head says of itself."""
    function = getattr(part_of(block), name, None)
    if function is not None and function.__doc__:
        return function.__doc__.splitlines()[0]
    return registered_line(OPEN[block], name)


def registered_line(registry: Registry, name: str) -> str:
    """Returns the first line that a file or an installed package says of a name.

    A file is not imported; a package that cannot be imported has its error.
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
    own = list(inspect.signature(part).parameters.values())[1:]
    return f"({', '.join(str(p) for p in own)})"
