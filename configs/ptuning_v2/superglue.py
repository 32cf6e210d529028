"""SuperGLUE with the released settings (Liu et al. 2022, table 2).

The argument is TASK,SYSTEM,MODEL: `--config=configs/ptuning_v2/superglue.py:wic,prefix,bert-large`.
"""

from configs.ptuning_v2 import SUPERGLUE, read_cell, runs_of, tune


def get_config(cell="rte,prefix,roberta-large"):
    """Returns one run."""
    return tune(*read_cell(cell, SUPERGLUE))


def sweep():
    """Yields the runs of the released settings, and of the search where there are none."""
    yield from runs_of(SUPERGLUE, ("prefix", "pt"), ("roberta-large", "bert-large"))
