"""Python runs this where it starts with this folder on PYTHONPATH: torch counts as absent."""

import sys

sys.modules["torch"] = None
