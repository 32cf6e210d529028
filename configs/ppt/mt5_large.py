"""mT5 large prompt-tuned with few examples: 1.2B parameters."""

from configs.ppt import sweep, tune

__all__ = ["get_config", "sweep"]


def get_config(cell="lcqmc"):
    """Returns one run."""
    return tune("mt5", "large", cell)
