"""Hides installed packages from this process.

transformers imports torch if it is installed, although only its tokenizers are needed here.
Measured with transformers 5.23 and torch 2.13 on 2 cores: `import AutoTokenizer` takes 3.5 to 6 s,
with torch hidden 1.6 to 2.3 s. Transformers 5 has no switch for this and ignores USE_TORCH=0
(4.4 to 5.2 s).
"""

import sys
from importlib.machinery import PathFinder

_HIDDEN: set[str] = set()


class _Finder(PathFinder):
    """Finds installed packages except hidden ones.

    None in sys.modules would hide a package too, but code that reads sys.modules, e.g. scipy,
    would take that None for the package.
    """

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        """Finds a module unless it is hidden."""
        return None if fullname in _HIDDEN else super().find_spec(fullname, path, target)


def hide(package: str) -> None:
    """Makes a package appear not installed, unless it is already imported."""
    if package not in sys.modules:
        _HIDDEN.add(package)
        # Replaced in place, because a finder before it could not end the search.
        sys.meta_path[:] = [_Finder if finder is PathFinder else finder for finder in sys.meta_path]


def unhide(package: str) -> None:
    """Makes a hidden package importable again."""
    _HIDDEN.discard(package)
