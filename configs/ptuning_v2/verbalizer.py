"""A linear layer on [CLS] against label words at a mask (Liu et al. 2022, section 4.3, table 4).

The argument is TASK,HEAD: `--config=configs/ptuning_v2/verbalizer.py:cb,verbalizer`. The words are
the paper's; where the mask stands it does not say: here behind the texts.
"""

from configs.parts import heads
from configs.ptuning_v2 import searched
from configs.ptuning_v2.superglue import RELEASED, WORDS, max_len_of, tune
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.errors import check_known

HEADS = ("linear", "verbalizer")
TASKS = ("sst2", "rte", "boolq", "cb")


def get_config(cell="rte,verbalizer"):
    """Returns one run."""
    task, _, head = cell.partition(",")
    c = tune(check_known("the task", task, TASKS))
    if check_known("the head", head or "verbalizer", HEADS) == "verbalizer":
        heads.verbalizer(c)
        c.task.template, c.task.words = f"{get_task(task).plain} [mask]", WORDS[task]
    return c


def sweep():
    """Yields both heads on every task."""
    for task in TASKS:
        for head in HEADS:
            for change in searched(task, "prefix", "roberta-large", RELEASED, max_len_of):
                yield {"config": f"{task},{head}", **change}
