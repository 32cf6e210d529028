"""T5 1.1 XL prompt-tuned with few examples: 2.8B parameters, over two devices."""

from configs.ppt import sweep, tune

__all__ = ["get_config", "sweep"]


def get_config(cell="boolq"):
    """Returns one run."""
    return tune("t5", "xl", cell, model=2)
