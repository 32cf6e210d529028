"""mT5 XL prompt-tuned with few examples: 3.7B parameters, over two devices."""

from configs.ppt import sweep, tune

__all__ = ["get_config", "sweep"]


def get_config(cell="lcqmc"):
    """Returns one run."""
    return tune("mt5", "xl", cell, model=2)
