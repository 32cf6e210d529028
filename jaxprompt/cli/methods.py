"""Lists the methods, or shows one with its fields."""

from collections.abc import Sequence

from jaxprompt.api.choices import choice_names
from jaxprompt.cli.listing import choose_name, list_block, read_name, show_block


def main(argv: Sequence[str]) -> int:
    """Prints all methods or one of them. Exit code 0."""
    name = read_name(__doc__, argv, "method")
    if name:
        print(show_block("prompt", choose_name("method", name, choice_names("prompt"))))
    else:
        print(list_block("prompt"))
    return 0
