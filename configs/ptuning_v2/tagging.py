"""Named entities and semantic roles (Liu et al. 2022, table 3, appendix A).

The argument is TASK,SYSTEM,MODEL: `--config=configs/ptuning_v2/tagging.py:conll12,pt,bert-large`.
"""

from configs.parts import heads
from configs.ptuning_v2 import SOFT, UNCASED, Recipe, make_run, read_cell, runs_of

NER, SRL = ("conll2003", "ontonotes5", "conll04"), ("conll12", "conll05")
TASKS = (*NER, *SRL)
SHARED = 128  # tokens of a prompt that several tasks share: around 100 (section 3.3)
# For semantic roles, the predicate follows the tokenizer's separator; the released code writes the
# text "[SEP]", which RoBERTa's tokenizer splits.
RELEASED = {
    ("conll2003", "roberta-large"): Recipe(16, 3e-2, 11, 30),
    ("conll04", "bert-large"): Recipe(32, 2e-2, 128, 40, 0.2),
    ("conll04", "roberta-large"): Recipe(32, 6e-2, 144, 80),
    ("ontonotes5", "bert-large"): Recipe(16, 1e-2, 16, 30),
    ("ontonotes5", "roberta-large"): Recipe(16, 7e-3, 48, 60, seed=14),
    ("conll05", "roberta-large"): Recipe(16, 6e-3, 224, 15),
    ("conll12", "bert-large"): Recipe(16, 5e-3, 128, 45),  # its script loads RoBERTa-large
    ("conll12", "roberta-large"): Recipe(32, 5e-3, 64, 45),
}
_POSITIONS = 512  # of BERT and RoBERTa, including those of a prefix
SWEPT = ("roberta-large", "bert-large", "deberta-xlarge")  # models of table 3


def tune(task, system="prefix", model="roberta-large", **changes):
    """Returns a run; `changes` replace values of the recipe."""
    recipe = RELEASED.get((task, model), Recipe(length=128))._replace(**changes)
    if system == "multi_task":  # the shared prompt keeps its length
        recipe = recipe._replace(length=SHARED)
    config = make_run(task, system, model, recipe)
    if model == "bert-large":
        config.backbone.path = UNCASED
    # The released code measures roles by seqeval (tasks/srl/dataset.py).
    config.task.metric = "entity_f1" if task in SRL else ""
    heads.tags(config, dropout=recipe.dropout)
    config.data.max_len = max_len_of(system, model, recipe.length if system != "full" else 0)
    config.optim.schedule = {"name": "exponential"}  # to 0.95 per epoch (code)
    return config


def max_len_of(system, model, length):
    """Returns the tokens of an input: as many as the model has (released code)."""
    bounded = model in ("bert-large", "roberta-large") and system not in SOFT
    return _POSITIONS - (length if bounded else 0)


def get_config(cell=""):
    """Returns one run."""
    return tune(*read_cell(cell, TASKS, default="conll2003"))


def sweep():
    """Yields runs with the released values, or a search if there are none."""
    yield from runs_of(TASKS, SWEPT, RELEASED, max_len_of)
