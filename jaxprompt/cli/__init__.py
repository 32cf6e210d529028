"""The commands, one file each, with `main(argv) -> exit code`."""

import sys

from jaxprompt.errors import escape


def log(line: str) -> None:
    """Prints a line to stderr."""
    print(escape(line), file=sys.stderr)


def print_text(text: str) -> None:
    """Prints text to stdout."""
    print(escape(text))
