"""mT5 XXL prompt-tuned with few examples: 12.9B parameters.

The argument is TASK,METHOD: `--config=configs/ppt/mt5_xxl.py:boolq,ppt`.
configs/parts/ppt.py has the values of each task and method (section 4.1, appendix C).
A model is divided over as few devices as its memory needs (mesh.model=0).
"""

from configs.ppt import sweep, tune

__all__ = ["get_config", "sweep"]


def get_config(cell="lcqmc"):
    """Returns one run."""
    return tune("mt5", "xxl", cell)
