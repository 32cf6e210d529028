"""Named entities and semantic roles (Liu et al. 2022, table 3, appendix A).

The argument is TASK,SYSTEM,MODEL: `--config=configs/ptuning_v2/tagging.py:conll12,pt,bert-large`.
"""

from configs.ptuning_v2 import TAGGING, read_cell, runs_of, tune


def get_config(cell="conll2003,prefix,roberta-large"):
    """Returns one run."""
    return tune(*read_cell(cell, TAGGING))


def sweep():
    """Yields the runs of the released settings, and of the search where there are none."""
    yield from runs_of(TAGGING, ("prefix", "pt"), ("roberta-large", "bert-large", "deberta-xlarge"))
