"""Lists the heads, or shows one with its fields."""

from collections.abc import Sequence

from jaxprompt.api.choices import choice_names
from jaxprompt.cli.listing import choose_name, list_block, read_name, show_block


def main(argv: Sequence[str]) -> int:
    """Prints all heads or one of them. Exit code 0."""
    name = read_name(__doc__, argv, "head")
    if name:
        print(show_block("head", choose_name("head", name, choice_names("head"))))
    else:
        print(list_block("head"))
    return 0
