"""Prompts in the first or in the last layers (Liu et al. 2022, figure 3).

The argument is TASK,ORDER,COUNT: `--config=configs/ptuning_v2/depth.py:rte,descending,8` has
prompts in layers 17 to 24 of BERT-large.
"""

from configs.ptuning_v2.superglue import tune
from jaxprompt.config.load import read_argument

TASKS, ORDERS = ("rte", "boolq"), ("ascending", "descending")
COUNTS = (4, 8, 12, 16, 20, 24)  # ours: the paper's text does not list those of the figure
LAYERS = 24


def interval(order, count, layers=LAYERS):
    """Returns `count` of `layers` layers, from the first up or from the last down."""
    return f"1-{count}" if order == "ascending" else f"{layers - count + 1}-{layers}"


def get_config(cell=""):
    """Returns one run."""
    counts = [*map(str, COUNTS)]
    task, order, count = read_argument(
        cell, TASK=("rte", TASKS), ORDER=("descending", ORDERS), COUNT=("24", counts)
    )
    config = tune(task, "prefix", "bert-large")
    config.prompt.layers = interval(order, int(count))
    return config


def sweep():
    """Yields the points of both curves."""
    for task in TASKS:
        for order in ORDERS:
            for count in COUNTS:
                yield {"config": f"{task},{order},{count}"}
