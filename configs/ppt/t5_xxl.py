"""T5 1.1 XXL prompt-tuned with few examples: 11.1B parameters over four devices, as published."""

from configs.ppt import sweep, tune

__all__ = ["get_config", "sweep"]


def get_config(cell="boolq"):
    """Returns one run."""
    return tune("t5", "xxl", cell, model=4)
