"""Prompt tuning of LM-adapted T5 as published, but for its z-loss (Lester et al. 2021, section 3).

The argument is a task: `--config=ppt/prompt_tuning:boolq`. The target is the label's text
and </s>, the loss is over all of it, and any word of the vocabulary may win.
"""

from configs.base import get_config as base
from configs.parts import backbones, heads, methods
from jaxprompt.data.tasks.registry import task_names
from jaxprompt.errors import check_known

TASKS = ("sst2", "mrpc", "rte", "cb", "boolq", "wic", "copa")
SEEDS = (0, 1, 2)


def get_config(task="sst2"):
    """Returns one run."""
    c = base()
    backbones.t5_lm(c, "base")
    methods.lester(c)
    c.task.name = check_known("the task", task, task_names())
    c.task.form = "text"
    heads.verbalizer(c, scores="full", span="target")
    c.data.max_len = 512
    c.data.multiple = 64
    c.train.eval_steps = 1000
    c.train.patience = 5
    return c


def sweep():
    """Yields every run."""
    for task in TASKS:
        for seed in SEEDS:
            yield {"config": task, "seed": seed}
