"""Packages that a process does without although they are installed."""

import sys

_HIDDEN: set[str] = set()


def hide(package: str) -> None:
    """Lets others find that a package is not installed, unless it is imported already."""
    if package not in sys.modules:
        sys.modules[package] = None
        _HIDDEN.add(package)


def show(package: str) -> None:
    """Lets a package that was hidden be imported."""
    if package in _HIDDEN:
        _HIDDEN.discard(package)
        del sys.modules[package]
