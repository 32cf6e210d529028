"""Prompts of 5 to 120 tokens, one per task or one per text (section 5.6, figure 5).

The argument is TASK,SYSTEM,PLACE,LENGTH: `--config=configs/ipt/prompt_length.py:cb,task,prefix,32`.
"""

from configs.ipt import RATES, SEEDS, SUPERGLUE, read_cell, tune

LENGTHS = (5, 10, 16, 32, 64, 100, 120)  # section 5.6
SYSTEMS = ("task", "pretrained")


def get_config(cell=""):
    """Returns one run."""
    *parts, length = read_cell(
        cell, default=("rte", "pretrained", "prompt"), LENGTH=("16", [*map(str, LENGTHS)])
    )
    return tune(*parts, length=int(length))


def sweep():
    """Yields the points of the curves; of each seed, the learning rate best on dev counts."""
    for task in SUPERGLUE:
        for system in SYSTEMS:
            for length in LENGTHS:
                for seed in SEEDS:
                    for lr in RATES:
                        yield {
                            "config": f"{task},{system},prompt,{length}",
                            "seed": seed,
                            "data.seed": seed,
                            "optim.lr": lr,
                        }
