"""Answers in a text, SQuAD 1.1 and 2.0 (Liu et al. 2022, table 3, appendix A).

The argument is TASK,SYSTEM,MODEL: `--config=configs/ptuning_v2/qa.py:squad_v2,prefix,bert-large`.
"""

from configs.ptuning_v2 import QA, read_cell, runs_of, tune


def get_config(cell="squad,prefix,roberta-large"):
    """Returns one run."""
    return tune(*read_cell(cell, QA))


def sweep():
    """Yields the runs of the released settings, and of the search where there are none."""
    yield from runs_of(QA, ("prefix", "pt"), ("roberta-large", "bert-large", "deberta-xlarge"))
