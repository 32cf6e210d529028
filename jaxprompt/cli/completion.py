"""Shell completion of commands, flags and config fields, with argcomplete.

With `pip install argcomplete`, in bash or zsh:

    eval "$(register-python-argcomplete jaxprompt)"
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from typing import NoReturn

from jaxprompt.cli import commands
from jaxprompt.cli.options import Parser
from jaxprompt.config.block import declared_leaves
from jaxprompt.config.load import load_config
from jaxprompt.config.open_blocks import OPEN
from jaxprompt.config.run import RunConfig
from jaxprompt.data.tasks.registry import task_names


class _Caught(Exception):
    """Carries the parser of a command."""


def complete() -> None:
    """Prints completions and exits; does nothing if argcomplete is not installed."""
    try:
        import argcomplete
    except ImportError:
        return
    line = os.environ.get("COMP_LINE", "")
    try:
        words = shlex.split(line, posix=False)
    except ValueError:  # a quote that is still open
        words = line.split()
    argcomplete.autocomplete(make_parser(words[1] if len(words) > 1 else ""))


def make_parser(command: str) -> argparse.ArgumentParser:
    """Returns the parser of all commands, with flags and fields only for `command`."""
    parser = argparse.ArgumentParser(prog="jaxprompt")
    subparsers = parser.add_subparsers(dest="command")
    for name in commands():
        if name != command:
            subparsers.add_parser(name)
            continue
        # Only for the command that is typed: its fields take time, and the shell waits.
        flags = parser_of(name)
        subparsers.add_parser(name, parents=[flags], add_help=False)
        if any(action.dest == "config" for action in flags._actions):
            add_fields(subparsers.choices[name])
    return parser


def parser_of(command: str) -> Parser:
    """Returns the parser of a command, with all its flags."""

    def catch(self: Parser, argv: Sequence[str]) -> NoReturn:
        raise _Caught(self)

    # A command makes its parser in main, which is run until it parses the flags.
    read = Parser.read
    Parser.read = catch  # type: ignore[method-assign]  # main makes the parser, none can be given
    try:
        commands()[command].main([])
    except _Caught as caught:
        return caught.args[0]
    finally:
        Parser.read = read  # type: ignore[method-assign]  # as above
    raise TypeError(f"{command} reads no flags")


def add_fields(parser: argparse.ArgumentParser) -> None:
    """Adds every config field as a flag, with its allowed words."""
    words: dict[str, Sequence[str]] = {
        name: field.words for name, field in declared_leaves(RunConfig)
    }
    words |= {f"{block}.name": registry.names() for block, registry in OPEN.items()}
    words["task.name"] = [*task_names(), "custom"]
    for name in load_config("base").leaves():
        parser.add_argument(f"--config.{name}", choices=words.get(name) or None)
