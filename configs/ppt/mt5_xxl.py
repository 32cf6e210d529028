"""mT5 XXL prompt-tuned with few examples: 12.9B parameters, over four devices."""

from configs.ppt import sweep, tune

__all__ = ["get_config", "sweep"]


def get_config(cell="lcqmc"):
    """Returns one run."""
    return tune("mt5", "xxl", cell, model=4)
