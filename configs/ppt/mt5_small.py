"""mT5 small prompt-tuned with few examples: 300M parameters."""

from configs.ppt import sweep, tune

__all__ = ["get_config", "sweep"]


def get_config(cell="lcqmc"):
    """Returns one run."""
    return tune("mt5", "small", cell)
