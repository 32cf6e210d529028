"""The commands: one file each, with `main(argv) -> exit code`, or several in COMMANDS of a file."""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxprompt.errors import escape


class Command(NamedTuple):
    """One command."""

    description: str  # one line
    main: Callable[[Sequence[str]], int | None]  # argv -> exit code


def commands() -> dict[str, Command]:
    """Imports the modules of this package. Returns their commands."""
    by_name: dict[str, Command] = {}
    for _, name, _ in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{name}")
        if hasattr(module, "main"):
            by_name[name] = Command((module.__doc__ or "").partition("\n")[0], module.main)
        by_name |= getattr(module, "COMMANDS", {})
    return by_name


def log(line: str) -> None:
    """Prints a line to stderr."""
    print(escape(line), file=sys.stderr)


def print_text(text: str) -> None:
    """Prints text to stdout."""
    print(escape(text))
