"""Prompts in some of the layers, from the first up or the last down (Liu et al. 2022, figure 3).

The argument is TASK,ORDER,COUNT: `--config=configs/ptuning_v2/depth.py:rte,descending,8` has
prompts in layers 17 to 24 of BERT-large.
"""

from configs.ptuning_v2.superglue import tune
from jaxprompt.errors import InputError, check_known

TASKS, ORDERS = ("rte", "boolq"), ("ascending", "descending")
COUNTS, LAYERS = (4, 8, 12, 16, 20, 24), 24  # the figure's labels are not in the text


def interval(order, count, layers=LAYERS):
    """Names `count` layers of `layers`, from the first up or the last down."""
    return f"1-{count}" if order == "ascending" else f"{layers - count + 1}-{layers}"


def get_config(cell="rte,descending,24"):
    """Returns one run."""
    task, order, count, *more = (*cell.split(","), "descending", "24")
    if len(more) > 2:
        raise InputError(f"{cell!r} has too many parts; give TASK,ORDER,COUNT")
    check_known("the task", task, TASKS)
    check_known("the order", order, ORDERS)
    c = tune(task, "prefix", "bert-large")
    c.prompt.layers = interval(order, int(check_known("the count", count, list(map(str, COUNTS)))))
    return c


def sweep():
    """Yields the points of both curves."""
    for task in TASKS:
        for order in ORDERS:
            for count in COUNTS:
                yield {"config": f"{task},{order},{count}"}
