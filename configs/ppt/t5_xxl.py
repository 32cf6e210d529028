"""T5 1.1 XXL prompt-tuned with few examples: 11.1B parameters.

The argument is TASK,METHOD: `--config=configs/ppt/t5_xxl.py:boolq,ppt`.
configs/parts/ppt.py has the values of each task and method (section 4.1, appendix C).
A model is divided over as few devices as its memory needs (mesh.model=0).
"""

from configs.ppt import sweep, tune

__all__ = ["get_config", "sweep"]


def get_config(cell="boolq"):
    """Returns one run."""
    return tune("t5", "xxl", cell)
