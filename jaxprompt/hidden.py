"""Packages that a process does without although they are installed."""

import sys
from importlib.machinery import PathFinder

_HIDDEN: set[str] = set()


class _Finder(PathFinder):
    """Finds what is installed but what is hidden.

    A None in sys.modules would hide a package too, but who looks there for what is imported, as
    scipy does, takes it for the package.
    """

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        """Looks a module up."""
        return None if fullname in _HIDDEN else super().find_spec(fullname, path, target)


def hide(package: str) -> None:
    """Lets others find that a package is not installed, unless it is imported already."""
    if package not in sys.modules:
        _HIDDEN.add(package)
        # In its place, since a finder in front of it cannot end a search.
        sys.meta_path[:] = [_Finder if it is PathFinder else it for it in sys.meta_path]


def show(package: str) -> None:
    """Lets a package that was hidden be imported."""
    _HIDDEN.discard(package)
