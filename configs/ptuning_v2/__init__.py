"""P-tuning v2: keys and values in every layer, for all kinds of tasks (Liu et al. 2022, ACL).

A file per kind. Its argument is TASK,SYSTEM,MODEL, of which the last may be left out:
`--config=configs/ptuning_v2/superglue.py:rte,prefix,bert-large`.

Batch, learning rate, length, epochs, dropout and seed are those of the released script of a task
and a model, run_script/run_TASK_MODEL.sh, where there is one. Where there is none, the learning
rate and the length are searched in the ranges of the search scripts, for 100 epochs (they search 20
to 120). So are those of prompt tuning and of P-tuning on every task and model: what is released was
chosen for prefixes.

Prompt tuning and P-tuning have a column together in the paper, each is a system here: soft tokens
between text and mask, and label words on the LM head (figure 2a, table 1). An LSTM computes those
of P-tuning, of a frozen backbone as well (section 4). Tags and spans have no label words (section
3.1), so that both have soft tokens in front there and the head of a prefix.

Where the paper and its released code disagree, or both are silent:
- the paper reports the development set, at the epoch that is best on it; here, where a task has no
  labeled test set, a tenth of train chooses the epoch and the development set is scored once;
- the pooler of BERT and RoBERTa is the checkpoint's and frozen (code; section 3.3 has none);
- the learning rate falls along a line on SuperGLUE, and to 0.95 an epoch elsewhere (code);
- prompt tuning has soft tokens among the word embeddings and a verbalizer (paper); the released
  code feeds what leaves the whole embedding layer into it again, and reads [CLS] by a linear layer;
- ours, since nothing is released: fine-tuning's learning rates; the second rate of an MLP; those of
  P-tuning; where label words are given for four tasks alone (section 4.3), those of others; batch,
  dropout and seed where a task and a model have no script; the 10 epochs of several tasks;
- on DeBERTa classes have a pooler that trains (code), with tanh where the released one has GELU;
- MultiRC's question and answer stand before the paragraph and ReCoRD's query before the passage;
  the released code has paragraph and passage first;
- the predicate of roles stands behind the tokenizer's own separator; with RoBERTa the released code
  writes the text "[SEP]" there, which is no token of it;
- nothing is released of several tasks at once either: `multi_task` starts from the prompt that they
  share, with its length, and from the task's head; all else is the recipe of the task's own prompt.
"""

from typing import NamedTuple

from configs.base import get_config as base
from configs.parts import heads, methods
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.errors import InputError, check_known

SEEDS = (11,)  # of most released scripts, which run once
RATES = (5e-3, 7e-3, 1e-2)  # of the released search
LENGTHS = (4, 8, 16, 32, 64, 128)
FULL_RATES = (1e-5, 2e-5, 5e-5)  # ours
MLP_RATES = (1e-4, 5e-4)  # the one released run with an MLP has 1e-4
P_TUNING_RATES = (1e-4, 5e-4, 1e-3)  # P-tuning's own code has 1e-4 at most, beside a tuned backbone
MLP = 512  # released default of prefix_hidden_size
SYSTEMS = ("prefix", "multi_task", "pt", "p_tuning", "full")
SOFT = ("pt", "p_tuning")  # whose tokens are among those of the input
MODELS = {
    "bert-large": "google-bert/bert-large-cased",  # uncased on tagging and questions
    "roberta-large": "FacebookAI/roberta-large",
    "deberta-xlarge": "microsoft/deberta-xlarge",
    "glm-2b": "THUDM/glm-2b",
    "glm-10b": "THUDM/glm-10b",
}
UNCASED = "google-bert/bert-large-uncased"
LIMIT = 512  # positions of BERT and RoBERTa, which those of a prefix are part of


class Recipe(NamedTuple):
    """How a task is trained with a model."""

    batch: int = 16
    lr: float = RATES[1]
    length: int = 16
    epochs: float = 100.0
    dropout: float = 0.1
    seed: int = 11
    hidden: int = 0  # width of the MLP that computes the prefix
    template: str = ""  # "" = the task's own


_WIC = "{sentence1} {sentence2} Does {word} have the same meaning in both sentences?"
_WSC = "{span2_text}: {text} [sep] {span1_text}"
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
    ("conll2003", "roberta-large"): Recipe(16, 3e-2, 11, 30),
    ("conll04", "bert-large"): Recipe(32, 2e-2, 128, 40, 0.2),
    ("conll04", "roberta-large"): Recipe(32, 6e-2, 144, 80),
    ("ontonotes5", "bert-large"): Recipe(16, 1e-2, 16, 30),
    ("ontonotes5", "roberta-large"): Recipe(16, 7e-3, 48, 60, seed=14),
    ("conll05", "roberta-large"): Recipe(16, 6e-3, 224, 15),
    ("conll12", "bert-large"): Recipe(16, 5e-3, 128, 45),  # its script loads RoBERTa-large
    ("conll12", "roberta-large"): Recipe(32, 5e-3, 64, 45),
    ("squad", "roberta-large"): Recipe(8, 5e-3, 16, 30, 0.2),
    ("squad_v2", "roberta-large"): Recipe(8, 5e-3, 8, 10, 0.2),
}
SUPERGLUE = ("boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc")  # table 2
NER, SRL = ("conll2003", "ontonotes5", "conll04"), ("conll12", "conll05")  # table 3
TAGGING, QA = (*NER, *SRL), ("squad", "squad_v2")
# Tokens of a prompt that several tasks train: section 3.3, around 100 on tagging.
SHARED = {**dict.fromkeys(TAGGING, 128), **dict.fromkeys(QA, 16)}
# Table 2 has accuracy for CB, whose own first metric is macro F1; the released code measures roles
# by seqeval (tasks/srl/dataset.py).
METRICS = {"cb": "accuracy", **dict.fromkeys(SRL, "entity_f1")}


# Label words in the order of the classes (section 4.3; of the tasks that it does not name they are
# ours). The choices of COPA are named by letters.
WORDS = {
    **dict.fromkeys(("sst2", "boolq", "multirc", "record", "wic", "wsc"), ("false", "true")),
    "rte": ("true", "false"), "cb": ("true", "false", "neutral"), "copa": (),
}  # fmt: skip


def recipe_of(task, model):
    """Returns what is released, else what the search starts from (section 3.3: short, or 100)."""
    long = task in (*TAGGING, *QA)
    return RELEASED.get((task, model), Recipe(length=128 if long else 16))


def read_cell(text, tasks, *rest):
    """Returns task, system and model of "TASK,SYSTEM,MODEL", and what else a file varies."""
    parts = text.split(",")
    plain = (tasks[0], "prefix", "roberta-large", *(default for _, default in rest))
    if len(parts) > len(plain):
        form = ",".join(["TASK", "SYSTEM", "MODEL", *(name for name, _ in rest)])
        raise InputError(f"{text!r} has {len(parts)} parts; give {form}")
    task, system, model, *more = (*parts, *plain[len(parts) :])
    check_known("the task", task, tasks)
    check_known("the system", system, SYSTEMS)
    return task, system, check_known("the model", model, MODELS), *more


def tune(task, system="prefix", model="roberta-large", *, shared="shared", **changes):
    """Returns a run; of `multi_task` prefix and head start from the export SHARED/TASK.

    `changes` replace fields of the recipe.
    """
    own = recipe_of(task, model)._replace(**changes)
    if system == "multi_task":  # the prompt is taken over as it is, neither cut nor repeated
        own = own._replace(length=SHARED.get(task, own.length))
    c = base()
    c.backbone.path = UNCASED if model == "bert-large" and task not in SUPERGLUE else MODELS[model]
    c.backbone.dropout = own.dropout
    c.task.name, c.task.template, c.task.metric = task, own.template, METRICS.get(task, "")
    _head(c, task, model, own.dropout)
    if system in SOFT and task in SUPERGLUE:
        _label_words(c, task)
    if system == "full":
        methods.full(c, lr=FULL_RATES[1])
    elif system == "pt":
        methods.soft(c, length=own.length, lr=own.lr)
    elif system == "p_tuning":
        methods.p_tuning(c, length=own.length, lr=P_TUNING_RATES[1])
    else:
        methods.prefix(c, length=own.length, lr=own.lr, dropout=own.dropout, hidden=own.hidden)
        c.prompt.init = f"{shared}/{task}" if system == "multi_task" else ""
        c.train.init_head = system == "multi_task"
    taken = own.length if system != "full" else 0
    c.data.max_len = max_len_of(task, system, model, taken)
    if task not in TAGGING:
        c.data.protocol = {"name": "fraction", "ratio": 0.9, "holdout": 0.1}
    c.data.batch, c.seed = own.batch, own.seed
    c.optim.schedule = {"name": "linear" if task not in (*TAGGING, *QA) else "exponential"}
    c.optim.weight_decay, c.optim.clip = 0.0, 1.0
    c.train.total_epochs, c.train.eval_epochs = own.epochs, 1.0
    return c


def _head(c, task, model, dropout):
    if task in TAGGING:
        heads.tags(c, dropout=dropout)
    elif task in QA:
        heads.spans(c, no_answer=task == "squad_v2", stride=128)
    else:
        heads.linear(c, dropout=dropout)
        if model == "deberta-xlarge":
            c.head.pooler = "trained"


def _label_words(c, task):
    """Asks for a word at a mask, in front of which the soft tokens stand (section 3, figure 2a)."""
    heads.verbalizer(c)
    texts = c.task.template or get_task(task).plain
    if task == "copa":
        texts = "{premise} {connective} {choices}"
    c.task.template, c.task.words = f"{texts} [soft] [mask]", WORDS[task]


def max_len_of(task, system, model, taken):
    """Counts the tokens of an input; soft tokens are among them, the places of a prefix are not."""
    if task in TAGGING:  # released code: as many as the model has
        bounded = model in ("bert-large", "roberta-large") and system not in SOFT
        return LIMIT - (taken if bounded else 0)
    return (384 if task in QA else 128) + (taken if system in SOFT else 0)


def runs_of(tasks, systems, models):
    """Yields the runs of a file; what is not released is searched."""
    for task in tasks:
        for system in systems:
            for model in models:
                for change in searched(task, system, model):
                    yield {"config": f"{task},{system},{model}", **change}


def is_released(task, system, model):
    """Tells whether the released settings are a system's own: they are those of prefixes."""
    return system not in SOFT and (task, model) in RELEASED


def rates_of(system):
    """Lists the learning rates that are searched where none is released."""
    return {"full": FULL_RATES, "p_tuning": P_TUNING_RATES}.get(system, RATES)


def searched(task, system, model):
    """Lists the values that are searched; beside any length the text has the same room."""
    if system != "full" and is_released(task, system, model):
        return [{}]
    rates = rates_of(system)
    if system in ("full", "multi_task"):
        return [{"optim.lr": lr} for lr in rates]
    return [
        {"optim.lr": lr, "prompt.length": n, "data.max_len": max_len_of(task, system, model, n)}
        for lr in rates
        for n in LENGTHS
    ]
