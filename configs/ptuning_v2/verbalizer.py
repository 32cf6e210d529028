"""A linear layer on [CLS] against label words at a mask (Liu et al. 2022, section 4.3, table 4).

The argument is TASK,HEAD: `--config=configs/ptuning_v2/verbalizer.py:cb,verbalizer`. The words are
the paper's; where the mask stands it does not say: here behind the texts.
"""

from configs.parts import heads
from configs.ptuning_v2 import searched, tune
from jaxprompt.errors import choose

HEADS = ("linear", "verbalizer")
PAIR = "{premise} [sep] {hypothesis} [mask]"
TASKS = {  # template and words, in the order of the task's labels
    "sst2": ("{sentence} [mask]", ("false", "true")),
    "rte": (PAIR, ("true", "false")),
    "boolq": ("{question} [sep] {passage} [mask]", ("false", "true")),
    "cb": (PAIR, ("true", "false", "neutral")),
}


def get_config(cell="rte,verbalizer"):
    """Returns one run."""
    task, _, head = cell.partition(",")
    template, words = TASKS[choose("the task", task, TASKS)]
    c = tune(task)
    if choose("the head", head or "verbalizer", HEADS) == "verbalizer":
        heads.verbalizer(c)
        c.task.template, c.task.words = template, words
    return c


def sweep():
    """Yields both heads on every task."""
    for task in TASKS:
        for head in HEADS:
            for change in searched(task, "prefix", "roberta-large"):
                yield {"config": f"{task},{head}", **change}
