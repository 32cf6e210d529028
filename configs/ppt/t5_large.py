"""T5 1.1 large prompt-tuned with few examples: 783M parameters."""

from configs.ppt import sweep, tune

__all__ = ["get_config", "sweep"]


def get_config(cell="boolq"):
    """Returns one run."""
    return tune("t5", "large", cell)
