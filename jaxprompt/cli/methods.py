"""Lists the methods, or shows one with its fields."""

from collections.abc import Sequence

from jaxprompt.api.choices import choice_names
from jaxprompt.cli.listing import choose_name, list_block, read_name, show_block


def main(argv: Sequence[str]) -> int:
    """Prints all methods or one of them. Exit code 0."""
    name = read_name(__doc__, argv, "method")
    print(show_block("prompt", choose_name("method", name, choice_names("prompt"))) if name else
          list_block("prompt"))  # fmt: skip
    return 0
