"""Prefixes of several lengths, as they are and by an MLP (Liu et al. 2022, appendix B, figure 4).

The argument is TASK,FORM,LENGTH: `--config=configs/ptuning_v2/prompt_length.py:rte,mlp,32`.
"""

from configs.ptuning_v2 import LENGTHS, MLP, MLP_RATES, RELEASED, tune
from jaxprompt.errors import InputError, check_known

TASKS = ("rte", "conll04", "boolq", "conll12")
FORMS = ("embedding", "mlp")


def rates_of(task, form):
    """Lists the learning rates: the released one, or those of an MLP, which are far smaller."""
    return MLP_RATES if form == "mlp" else (RELEASED[task, "roberta-large"].lr,)


def get_config(cell="rte,embedding,32"):
    """Returns one run."""
    task, form, length, *more = (*cell.split(","), "embedding", "32")
    if len(more) > 2:
        raise InputError(f"{cell!r} has too many parts; give TASK,FORM,LENGTH")
    check_known("the task", task, TASKS)
    check_known("the form", form, FORMS)
    length = int(check_known("the length", length, list(map(str, LENGTHS))))
    hidden = MLP if form == "mlp" else 0
    return tune(task, length=length, hidden=hidden, lr=rates_of(task, form)[0])


def sweep():
    """Yields the points of the curves."""
    for task in TASKS:
        for form in FORMS:
            for length in LENGTHS:
                for lr in rates_of(task, form):
                    yield {"config": f"{task},{form},{length}", "optim.lr": lr}
