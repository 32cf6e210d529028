"""P-tuning v2: keys and values in every layer, for all kinds of tasks (Liu et al. 2022, ACL).

superglue.py, tagging.py and qa.py have the values of tables 2 and 3. Their argument is
TASK,SYSTEM,MODEL: `--config=configs/ptuning_v2/superglue.py:rte,prefix,bert-large`. Parts at the
end can be left out. The files of the ablations change one thing in these runs.

A RELEASED table has the settings of run_script/run_TASK_MODEL.sh in the authors' code, which were
chosen for prefixes. Where there is no such script, and for prompt tuning and P-tuning on every
task, the learning rate and the length are searched in the ranges of the authors' search scripts,
for 100 epochs (the scripts search 20 to 120).

Prompt tuning (`pt`) and `p_tuning` share a column in the paper. Both have soft tokens between text
and mask, and label words on the LM head (figure 2a, table 1); those of P-tuning are computed by an
LSTM, here with a frozen backbone too (section 4). Tags and spans have no label words (section 3.1):
there, both have soft tokens before the input, and the same head as a prefix.

Choices, where the paper and its released code disagree or say nothing:
- The paper reports the development set, at the epoch that is best on it. Here, where a task has no
  labelled test set, a tenth of train chooses the epoch and the development set is scored once.
- The pooler of BERT and RoBERTa is loaded from the checkpoint and frozen (code; section 3.3 has no
  pooler).
- Prompt tuning has soft tokens among the word embeddings and a verbalizer (paper). The released
  code passes the output of the embedding layer through it again, and classifies [CLS] linearly.
- Our values, where nothing is released: the learning rates of fine-tuning and P-tuning, the second
  rate of an MLP, and batch, dropout and seed of tasks and models without a script.
- Nothing is released for several tasks at once. `multi_task` starts from the prompt that the tasks
  share, with its length, and from the head of the task; all other values are those of `prefix`.
"""

from typing import NamedTuple

from configs.base import paper as base
from configs.parts import methods
from jaxprompt.config.load import read_argument

SEEDS = (11,)  # of most released scripts, which run once
RATES = (5e-3, 7e-3, 1e-2)  # learning rates of the released search
LENGTHS = (4, 8, 16, 32, 64, 128)  # of the released search
FULL_RATES = (1e-5, 2e-5, 5e-5)  # learning rates of fine-tuning: ours
# Ours; P-tuning's released code has at most 1e-4, with a backbone that is tuned too.
P_TUNING_RATES = (1e-4, 5e-4, 1e-3)
SYSTEMS = ("prefix", "multi_task", "pt", "p_tuning", "full")
SOFT = ("pt", "p_tuning")  # systems with soft tokens in the input
MODELS = {
    "bert-large": "google-bert/bert-large-cased",
    "roberta-large": "FacebookAI/roberta-large",
    "deberta-xlarge": "microsoft/deberta-xlarge",
    "glm-2b": "THUDM/glm-2b",
    "glm-10b": "THUDM/glm-10b",
}
UNCASED = "google-bert/bert-large-uncased"  # bert-large for tags and questions


class Recipe(NamedTuple):
    """Values of a task with a model."""

    batch: int = 16
    lr: float = RATES[1]
    length: int = 16
    epochs: float = 100.0
    dropout: float = 0.1
    seed: int = 11
    hidden: int = 0  # width of the MLP that computes the prefix; 0 = no MLP
    template: str = ""  # "" = the task's default


def read_cell(text, tasks, default):
    """Returns task, system and model of "TASK,SYSTEM,MODEL"; `default` is the task if left out."""
    return read_argument(
        text, TASK=(default, tasks), SYSTEM=("prefix", SYSTEMS), MODEL=("roberta-large", MODELS)
    )


def make_run(task, system, model, recipe):
    """Returns a run; the caller sets its head, its text length and its schedule.

    With `multi_task`, prefix and head start from the export shared/TASK.
    """
    config = base()
    config.backbone.path, config.backbone.dropout = MODELS[model], recipe.dropout
    config.task.name, config.task.template = task, recipe.template
    if system == "full":
        methods.full(config, lr=FULL_RATES[1])
    elif system == "pt":
        methods.soft(config, length=recipe.length, lr=recipe.lr)
    elif system == "p_tuning":
        methods.p_tuning(config, length=recipe.length, lr=P_TUNING_RATES[1])
    else:
        methods.prefix(
            config, recipe.lr, recipe.dropout, length=recipe.length, hidden=recipe.hidden
        )
        config.prompt.init = f"shared/{task}" if system == "multi_task" else ""
        config.train.init_head = system == "multi_task"
    config.data.batch, config.seed = recipe.batch, recipe.seed
    config.optim.weight_decay, config.optim.clip = 0.0, 1.0
    config.train.total_epochs, config.train.eval_epochs = recipe.epochs, 1.0
    return config


def rates_of(system):
    """Returns the learning rates to search where none is released."""
    return {"full": FULL_RATES, "p_tuning": P_TUNING_RATES}.get(system, RATES)


def searched(task, system, model, released, max_len_of):
    """Returns the overrides to search: learning rates, and lengths with the max_len that fits each.

    Args:
      task: the task's name.
      system: one of SYSTEMS.
      model: one of MODELS.
      released: recipes by (task, model), which need no search.
      max_len_of: function of (system, model, length) to the tokens of an input.
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
    """Yields the runs of `prefix` and `pt`, with the released values or the search."""
    for task in tasks:
        for system in ("prefix", "pt"):
            for model in models:
                for change in searched(task, system, model, released, max_len_of):
                    yield {"config": f"{task},{system},{model}", **change}
