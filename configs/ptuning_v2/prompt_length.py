"""Prefixes of several lengths, with and without an MLP (Liu et al. 2022, appendix B, figure 4).

The argument is TASK,FORM,LENGTH: `--config=configs/ptuning_v2/prompt_length.py:rte,mlp,32`.
"""

from configs.ptuning_v2 import LENGTHS, superglue, tagging
from jaxprompt.config.load import read_argument

TASKS = ("rte", "conll04", "boolq", "conll12")
FORMS = ("embedding", "mlp")
MLP_RATES = (1e-4, 5e-4)  # the one released run with an MLP has 1e-4


def kind_of(task):
    """Returns the module with the recipe of a task."""
    return tagging if task in tagging.TASKS else superglue


def rates_of(task, form):
    """Returns the learning rates: the released one, or the far smaller ones of an MLP."""
    return MLP_RATES if form == "mlp" else (kind_of(task).RELEASED[task, "roberta-large"].lr,)


def get_config(cell=""):
    """Returns one run."""
    lengths = [*map(str, LENGTHS)]
    task, form, length = read_argument(
        cell, TASK=("rte", TASKS), FORM=("embedding", FORMS), LENGTH=("32", lengths)
    )
    hidden = superglue.MLP if form == "mlp" else 0
    return kind_of(task).tune(task, length=int(length), hidden=hidden, lr=rates_of(task, form)[0])


def sweep():
    """Yields the points of the curves."""
    for task in TASKS:
        for form in FORMS:
            for length in LENGTHS:
                for lr in rates_of(task, form):
                    yield {"config": f"{task},{form},{length}", "optim.lr": lr}
