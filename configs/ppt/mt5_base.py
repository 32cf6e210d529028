"""mT5 base prompt-tuned with few examples: 582M parameters.

The argument is TASK,METHOD: `--config=configs/ppt/mt5_base.py:boolq,ppt`.
configs/parts/ppt.py has the values of each task and method (section 4.1, appendix C).
"""

from configs.ppt import sweep, tune

__all__ = ["get_config", "sweep"]


def get_config(cell="lcqmc"):
    """Returns one run."""
    return tune("mt5", "base", cell)
