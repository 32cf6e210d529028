"""The one exception that means: the user's input is wrong, and this line says how to mend it."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input. The message is one line that names the value, the limit and the cure.

    The command line prints it without a traceback and exits with 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Lists what `name` may have meant: the close matches, else all of `known` (at most 12)."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    shown = close or known[:12]
    more = "" if close or len(known) <= 12 else f", ... ({len(known)} in all)"
    return ("nearest: " if close else "known: ") + ", ".join(shown) + more
