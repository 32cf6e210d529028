"""P-tuning v2: keys and values in every layer, for all kinds of tasks (Liu et al. 2022, ACL).

A file per kind of task: superglue.py, tagging.py and qa.py have the values of its tables 2 and 3.
Their argument is TASK,SYSTEM,MODEL, of which the last may be left out:
`--config=configs/ptuning_v2/superglue.py:rte,prefix,bert-large`. The files of the ablations change
one thing in these runs.

A RELEASED table has the settings of run_script/run_TASK_MODEL.sh in the authors' code, where there
is one. They were chosen for prefixes. Where there is none, and for prompt tuning and P-tuning on
every task, the learning rate and the length are searched in the ranges of the search scripts, for
100 epochs (they search 20 to 120).

Prompt tuning and P-tuning share a column in the paper; each is a system here: soft tokens between
text and mask, and label words on the LM head (figure 2a, table 1). An LSTM computes those of
P-tuning, on a frozen backbone too (section 4). Tags and spans have no label words (section 3.1), so
both systems have soft tokens in front of the input there, and the head of a prefix.

Where the paper and its released code disagree, or both are silent:
- the paper reports the development set, at the epoch that is best on it; here, where a task has no
  labeled test set, a tenth of train chooses the epoch and the development set is scored once;
- the pooler of BERT and RoBERTa is the checkpoint's and frozen (code; section 3.3 has none);
- prompt tuning has soft tokens among the word embeddings and a verbalizer (paper); the released
  code feeds the output of the embedding layer into it again, and reads [CLS] by a linear layer;
- ours, since nothing is released: fine-tuning's learning rates; the second rate of an MLP; those of
  P-tuning; batch, dropout and seed where a task and a model have no script;
- nothing is released for several tasks at once: the system `multi_task` starts from the prompt that
  they share, with its length, and from the task's head; the rest is the recipe of the task's own
  prompt.
"""

from typing import NamedTuple

from configs.base import get_config as base
from configs.parts import methods
from jaxprompt.errors import InputError, check_known

SEEDS = (11,)  # of most released scripts, which run once
RATES = (5e-3, 7e-3, 1e-2)  # of the released search
LENGTHS = (4, 8, 16, 32, 64, 128)  # of the released search
FULL_RATES = (1e-5, 2e-5, 5e-5)  # ours
P_TUNING_RATES = (1e-4, 5e-4, 1e-3)  # P-tuning's own code has 1e-4 at most, beside a tuned backbone
SYSTEMS = ("prefix", "multi_task", "pt", "p_tuning", "full")
SOFT = ("pt", "p_tuning")  # systems whose tokens are among those of the input
MODELS = {
    "bert-large": "google-bert/bert-large-cased",
    "roberta-large": "FacebookAI/roberta-large",
    "deberta-xlarge": "microsoft/deberta-xlarge",
    "glm-2b": "THUDM/glm-2b",
    "glm-10b": "THUDM/glm-10b",
}
UNCASED = "google-bert/bert-large-uncased"  # of bert-large on tags and questions


class Recipe(NamedTuple):
    """How a task is trained with a model."""

    batch: int = 16
    lr: float = RATES[1]
    length: int = 16
    epochs: float = 100.0
    dropout: float = 0.1
    seed: int = 11
    hidden: int = 0  # width of the MLP that computes the prefix
    template: str = ""  # "" = the task's default


def read_cell(text, tasks, *rest):
    """Returns task, system and model of "TASK,SYSTEM,MODEL", and further parts of the argument."""
    parts = text.split(",")
    defaults = (tasks[0], "prefix", "roberta-large", *(default for _, default in rest))
    if len(parts) > len(defaults):
        form = ",".join(["TASK", "SYSTEM", "MODEL", *(name for name, _ in rest)])
        raise InputError(f"{text!r} has {len(parts)} parts; give {form}")
    task, system, model, *more = (*parts, *defaults[len(parts) :])
    check_known("the task", task, tasks)
    check_known("the system", system, SYSTEMS)
    return task, system, check_known("the model", model, MODELS), *more


def make_run(task, system, model, recipe):
    """Returns a run without its head, its text length and its schedule, which a kind of task sets.

    With `multi_task`, prefix and head start from the export shared/TASK.
    """
    c = base()
    c.backbone.path, c.backbone.dropout = MODELS[model], recipe.dropout
    c.task.name, c.task.template = task, recipe.template
    if system == "full":
        methods.full(c, lr=FULL_RATES[1])
    elif system == "pt":
        methods.soft(c, length=recipe.length, lr=recipe.lr)
    elif system == "p_tuning":
        methods.p_tuning(c, length=recipe.length, lr=P_TUNING_RATES[1])
    else:
        methods.prefix(c, recipe.lr, recipe.dropout, length=recipe.length, hidden=recipe.hidden)
        c.prompt.init = f"shared/{task}" if system == "multi_task" else ""
        c.train.init_head = system == "multi_task"
    c.data.batch, c.seed = recipe.batch, recipe.seed
    c.optim.weight_decay, c.optim.clip = 0.0, 1.0
    c.train.total_epochs, c.train.eval_epochs = recipe.epochs, 1.0
    return c


def rates_of(system):
    """Returns the learning rates that are searched where none is released."""
    return {"full": FULL_RATES, "p_tuning": P_TUNING_RATES}.get(system, RATES)


def searched(task, system, model, released, max_len_of):
    """Returns the values that are searched; the text has the same room beside any length.

    `released` and `max_len_of` are those of the kind of task.
    """
    if system in ("prefix", "multi_task") and (task, model) in released:
        return [{}]
    if system in ("full", "multi_task"):
        return [{"optim.lr": lr} for lr in rates_of(system)]
    return [
        {"optim.lr": lr, "prompt.length": length, "data.max_len": max_len_of(system, model, length)}
        for lr in rates_of(system)
        for length in LENGTHS
    ]


def runs_of(tasks, models, released, max_len_of):
    """Yields the runs of prefixes and of prompt tuning; what is not released is searched."""
    for task in tasks:
        for system in ("prefix", "pt"):
            for model in models:
                for change in searched(task, system, model, released, max_len_of):
                    yield {"config": f"{task},{system},{model}", **change}
