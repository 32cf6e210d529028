"""Lists the methods, or shows one with its fields."""

from collections.abc import Sequence

from jaxprompt.cli.listing import print_block


def main(argv: Sequence[str]) -> int:
    """Prints all methods or one of them. Exit code 0."""
    return print_block(__doc__, argv, "method", "prompt")
