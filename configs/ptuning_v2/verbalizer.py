"""A linear layer on [CLS] against label words at a mask (Liu et al. 2022, section 4.3, table 4).

The argument is TASK,HEAD: `--config=configs/ptuning_v2/verbalizer.py:cb,verbalizer`. The words are
the paper's. It does not say where the mask is: here it follows the texts.
"""

from configs.parts import heads
from configs.ptuning_v2 import searched
from configs.ptuning_v2.superglue import RELEASED, WORDS, max_len_of, tune
from jaxprompt.config.load import read_argument
from jaxprompt.data.tasks.registry import get_task

HEADS = ("linear", "verbalizer")
TASKS = ("sst2", "rte", "boolq", "cb")


def get_config(cell=""):
    """Returns one run."""
    task, head = read_argument(cell, TASK=("rte", TASKS), HEAD=("verbalizer", HEADS))
    config = tune(task)
    if head == "verbalizer":
        heads.verbalizer(config)
        config.task.template, config.task.words = f"{get_task(task).plain} [mask]", WORDS[task]
    return config


def sweep():
    """Yields both heads on every task."""
    for task in TASKS:
        for head in HEADS:
            for change in searched(task, "prefix", "roberta-large", RELEASED, max_len_of):
                yield {"config": f"{task},{head}", **change}
