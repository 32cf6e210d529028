"""Questions whose answers are in a text, SQuAD 1.1 and 2.0 (Liu et al. 2022, table 3, appendix A).

The argument is TASK,SYSTEM,MODEL: `--config=configs/ptuning_v2/qa.py:squad_v2,prefix,bert-large`.
"""

from configs.parts import heads
from configs.ptuning_v2 import SOFT, UNCASED, Recipe, make_run, read_cell, runs_of

TASKS = ("squad", "squad_v2")
SHARED = 16  # tokens of a prompt that both tasks share
RELEASED = {
    ("squad", "roberta-large"): Recipe(8, 5e-3, 16, 30, 0.2),
    ("squad_v2", "roberta-large"): Recipe(8, 5e-3, 8, 10, 0.2),
}
SWEPT = ("roberta-large", "bert-large", "deberta-xlarge")  # models of table 3


def tune(task, system="prefix", model="roberta-large", **changes):
    """Returns a run; `changes` replace values of the recipe."""
    recipe = RELEASED.get((task, model), Recipe(length=128))._replace(**changes)
    if system == "multi_task":  # the shared prompt keeps its length
        recipe = recipe._replace(length=SHARED)
    config = make_run(task, system, model, recipe)
    if model == "bert-large":
        config.backbone.path = UNCASED
    heads.spans(config, no_answer=task == "squad_v2", stride=128)
    config.data.max_len = max_len_of(system, model, recipe.length)
    config.data.protocol = {"name": "fraction", "ratio": 0.9, "holdout": 0.1}
    config.optim.schedule = {"name": "exponential"}  # to 0.95 per epoch (code)
    return config


def max_len_of(system, model, length):
    """Returns the tokens of an input, soft tokens included; a prefix needs none."""
    return 384 + (length if system in SOFT else 0)


def get_config(cell=""):
    """Returns one run."""
    return tune(*read_cell(cell, TASKS, default="squad"))


def sweep():
    """Yields runs with the released values, or a search if there are none."""
    yield from runs_of(TASKS, SWEPT, RELEASED, max_len_of)
