"""Prompts of 5 to 120 tokens, of a task and of each text (section 5.6, figure 5).

The argument is TASK,SYSTEM,PLACE,LENGTH, as in `configs/ipt/prompt_length.py:cb,task,prefix,32`.
"""

from configs.ipt import RATES, SEEDS, SUPERGLUE, read_cell, tune
from jaxprompt.errors import check_known

LENGTHS = (5, 10, 16, 32, 64, 100, 120)  # section 5.6
SYSTEMS = ("task", "pretrained")


def get_config(cell="rte,pretrained,prompt,16"):
    """Returns one run."""
    *parts, length = read_cell(cell, ("LENGTH", "16"))
    return tune(*parts, length=int(check_known("the length", length, list(map(str, LENGTHS)))))


def sweep():
    """Yields the points of the curves; of each seed the learning rate best on dev counts."""
    for task in SUPERGLUE:
        for system in SYSTEMS:
            for length in LENGTHS:
                for seed in SEEDS:
                    for lr in RATES:
                        yield {
                            "config": f"{task},{system},prompt,{length}", "seed": seed,
                            "data.seed": seed, "optim.lr": lr,
                        }  # fmt: skip
