"""mT5 base prompt-tuned with few examples: 582M parameters."""

from configs.ppt import sweep, tune

__all__ = ["get_config", "sweep"]


def get_config(cell="lcqmc"):
    """Returns one run."""
    return tune("mt5", "base", cell)
