"""Prompt tuning of LM-adapted T5 as published, without z-loss (Lester et al. 2021, section 3).

The argument is a task: `--config=ppt/prompt_tuning:boolq`. The target is the text of the label and
</s>, the loss includes both, and the whole vocabulary is scored.
"""

from configs.base import paper as base
from configs.parts import backbones, heads, methods
from jaxprompt.data.tasks.registry import task_names
from jaxprompt.errors import check_known

TASKS = ("sst2", "mrpc", "rte", "cb", "boolq", "wic", "copa")
SEEDS = (0, 1, 2)


def get_config(task="sst2"):
    """Returns one run."""
    config = base()
    backbones.t5_lm(config, "base")
    methods.lester(config)
    config.task.name = check_known("the task", task, task_names())
    config.task.form = "text"
    heads.verbalizer(config, scores="full", span="target")
    config.data.max_len = 512
    config.data.multiple = 64
    config.train.eval_steps = 1000
    config.train.patience = 5
    return config


def sweep():
    """Yields every run."""
    for task in TASKS:
        for seed in SEEDS:
            yield {"config": task, "seed": seed}
