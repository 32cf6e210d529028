"""Lists the heads, or shows one with its fields."""

from collections.abc import Sequence

from jaxprompt.cli.listing import print_block


def main(argv: Sequence[str]) -> int:
    """Prints all heads or one of them. Exit code 0."""
    return print_block(__doc__, argv, "head", "head")
