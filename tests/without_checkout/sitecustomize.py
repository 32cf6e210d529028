"""Python runs this where it starts with this folder on PYTHONPATH: no checkout can be imported."""

import sys
from pathlib import Path

PARTS = ("jaxprompt", "launch")
sys.path[:] = [x for x in sys.path if not all(Path(x, part).is_dir() for part in PARTS)]
