"""SuperGLUE (Liu et al. 2022, table 2), and SST-2 for table 4.

The argument is TASK,SYSTEM,MODEL: `--config=configs/ptuning_v2/superglue.py:wic,prefix,bert-large`.
"""

from configs.parts import heads
from configs.ptuning_v2 import SOFT, Recipe, make_run, read_cell, runs_of
from jaxprompt.data.tasks.registry import get_task

TASKS = ("boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc")
MLP = 512  # released default of prefix_hidden_size
_WIC = "{sentence1} {sentence2} Does {word} have the same meaning in both sentences?"
_WSC = "{span2_text}: {text} [sep] {span1_text}"
# In MultiRC the question and answer come before the paragraph, in ReCoRD the query before the
# passage; the released code has paragraph and passage first.
RELEASED = {
    ("boolq", "bert-large"): Recipe(32, 5e-3, 40, 100),
    ("boolq", "roberta-large"): Recipe(32, 7e-3, 8, 100),
    ("rte", "bert-large"): Recipe(32, 1e-2, 20, 60),
    ("rte", "roberta-large"): Recipe(32, 5e-3, 128, 100),
    ("copa", "bert-large"): Recipe(16, 1e-2, 16, 80, seed=44),
    ("copa", "roberta-large"): Recipe(16, 9e-3, 8, 120),
    ("wic", "bert-large"): Recipe(16, 1e-4, 20, 80, seed=44, hidden=MLP),
    ("wic", "roberta-large"): Recipe(32, 1e-2, 8, 50, template=_WIC),
    ("wsc", "bert-large"): Recipe(16, 5e-3, 20, 80, seed=44, template=_WSC),
    ("wsc", "roberta-large"): Recipe(16, 1e-2, 8, 10, seed=44, template=_WSC),
}
# Label words in the order of the classes: those of section 4.3 for SST-2, RTE, BoolQ and CB, ours
# for the others. The choices of COPA are named by letters.
WORDS = {
    **dict.fromkeys(("sst2", "boolq", "multirc", "record", "wic", "wsc"), ("false", "true")),
    "rte": ("true", "false"), "cb": ("true", "false", "neutral"), "copa": (),
}  # fmt: skip


def tune(task, system="prefix", model="roberta-large", **changes):
    """Returns a run; `changes` replace values of the recipe."""
    recipe = RELEASED.get((task, model), Recipe())._replace(**changes)
    config = make_run(task, system, model, recipe)
    if task == "cb":
        config.task.metric = "accuracy"  # table 2; the task's first metric is macro F1
    heads.linear(config, dropout=recipe.dropout)
    if model == "deberta-xlarge":  # its pooler trains (code), with tanh instead of GELU
        config.head.pooler = "trained"
    if system in SOFT and task in TASKS:  # a mask after the soft tokens (section 3, figure 2a)
        heads.verbalizer(config)
        texts = config.task.template or get_task(task).plain
        if task == "copa":
            texts = "{premise} {connective} {choices}"
        config.task.template, config.task.words = f"{texts} [soft] [mask]", WORDS[task]
    config.data.max_len = max_len_of(system, model, recipe.length)
    config.data.protocol = {"name": "fraction", "ratio": 0.9, "holdout": 0.1}
    config.optim.schedule = {"name": "linear"}
    return config


def max_len_of(system, model, length):
    """Returns the tokens of an input, soft tokens included; a prefix needs none."""
    return 128 + (length if system in SOFT else 0)


def get_config(cell=""):
    """Returns one run."""
    return tune(*read_cell(cell, TASKS, default="rte"))


def sweep():
    """Yields runs with the released values, or a search if there are none."""
    yield from runs_of(TASKS, ("roberta-large", "bert-large"), RELEASED, max_len_of)
