"""Methods of kinds that do not ship yet, to hold the contract against."""

import contextlib
import sys
from pathlib import Path

from jaxprompt import registry

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))


@contextlib.contextmanager
def known():
    """Makes them methods for a block, those of a package that is installed here."""
    sys.path.append(str(FOLDER))
    registry.entry_points.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        registry.entry_points.cache_clear()
