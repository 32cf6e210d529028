"""What `launch/test.sh --all` adds to the tests that run by default: cases that take long.

tests/long.txt names them, a line each: FILE::TEST is a whole test, FILE::TEST[CASE] one case, or
all that begin so. A case is one of them where a shorter one beside it goes the same way, or where
what it holds is one part of the product that few changes touch.
"""

from pathlib import Path

LONG = frozenset((Path(__file__).parent / "long.txt").read_text("utf-8").split("\n")[:-1])
_BEGINNINGS = tuple(name for name in LONG if "[" in name)


def is_long(file: str, name: str) -> bool:
    """Tells whether a test of `file`, by its name with the brackets, is one of these."""
    whole = f"{file}::{name}"
    return whole.partition("[")[0] in LONG or whole.startswith(_BEGINNINGS)
