"""DART with 16 examples per class (Zhang et al. 2022, section 5.2 and appendix A).

The argument is TASK,ABLATION: `--config=dart/few_shot:sst2`,
`--config=dart/few_shot:trec,no_fluency`. The ablation `p_tuning` is the paper's P-tuning baseline;
`full` is fine-tuning with DART's schedule (the fine-tuning of the paper's tables is
configs/dart/lm_bff.py:TASK,full).

The words of a task's template and its label words become trained embeddings (appendix A.2). Subj
has the label words of Gao et al. 2021, table 1, subjective and objective; appendix A.2 has
incorrect and correct. Eq. 1 has a [SEP] between text and template, unlike appendix A.2, LM-BFF and
the first released code; `[sep]` in task.template adds it. The paper also searches weight decay,
epochs, batch size and accumulation (appendix A.1); a run has one value of each, and the best epoch
on dev counts.
"""

from typing import NamedTuple

from configs.base import paper as base
from configs.parts import heads, methods
from jaxprompt.config.load import read_argument
from jaxprompt.config.open_blocks import make_block

SEEDS = (13, 21, 42, 87, 100)  # section 5.2: the splits of LM-BFF
RATES = (1e-5, 5e-5, 1e-4, 2e-4)  # appendix A.1
FULL_RATES = (1e-5, 2e-5, 5e-5)  # of fine-tuning (Gao et al. 2021, appendix A)


class Words(NamedTuple):
    """A template with trained embeddings, and the words that initialise these."""

    template: str
    text: str
    length: int
    epochs: float = 20.0  # appendix A.1: the first of its grid
    max_len: int = 128


_IT_WAS = "[soft*2] [mask][soft*1]"
_NLI = 30.0, 256  # mnli and snli (appendix A.1)


def _pair(first, second, *more):
    # Appendix A.2; Gao et al. 2021 have no "?" for mrpc and qqp.
    template = f"{{{first}|chop}} [soft*1] [mask] [soft*1] {{{second}|lower}}"
    return Words(template, "? ,", 2, *more)


TASKS = {
    "sst2": Words("{sentence} " + _IT_WAS, "It was.", 3),
    "mr": Words("{text} " + _IT_WAS, "It was.", 3),
    "cr": Words("{text} " + _IT_WAS, "It was.", 3),
    "mpqa": Words("{text} " + _IT_WAS, "It was.", 3),
    "sst5": Words("{text} " + _IT_WAS, "It was.", 3),
    "subj": Words("{text} [soft*2] [mask][soft*1]", "This is.", 3),
    "trec": Words("[mask] [soft*1] {text}", ":", 1),
    "mnli": _pair("premise", "hypothesis", *_NLI),
    "snli": _pair("premise", "hypothesis", *_NLI),
    "qnli": _pair("question", "sentence"),
    "mrpc": _pair("sentence1", "sentence2"),
    "qqp": _pair("question1", "question2"),
}
# Section 5.4, table 3, and the baselines; frozen is not in the paper.
ABLATIONS = ("", "no_fluency", "fixed_template", "fixed_labels", "frozen", "full", "p_tuning")


def get_config(argument=""):
    """Returns one run."""
    task, ablation = read_argument(argument, TASK=("sst2", TASKS), ABLATION=("", ABLATIONS))
    words = TASKS[task]
    config = base()
    if ablation == "full":  # a linear head on the text alone
        heads.linear(config)
        methods.full(config, lr=FULL_RATES[0])
    else:
        methods.dart(config, length=words.length, text=words.text, lr=RATES[0])
        config.task.template = words.template
    config.backbone.path = "FacebookAI/roberta-large"
    config.task.name = task
    config.data.protocol = {"name": "kshot", "k": 16}
    config.data.max_len = words.max_len
    config.data.batch = 8  # in all grids of appendix A.1
    config.optim.schedule = {"name": "warmup_linear", "warmup_ratio": 0.1}
    config.train.total_epochs = words.epochs
    config.train.eval_epochs = 1.0
    if ablation == "no_fluency":
        config.prompt.fluency = 0.0
    elif ablation == "fixed_template":
        config.trainable = (r"prompt/rows", r"head/.*", r"backbone/.*")
    elif ablation == "p_tuning":  # without anchor words (appendix A)
        heads.verbalizer(config)
        config.prompt = make_block("prompt", "p_tuning", length=words.length)
        config.trainable = (r"prompt/.*", r"backbone/.*")
    elif ablation == "fixed_labels":
        heads.verbalizer(config)
        config.prompt.labels = False
        config.trainable = (r"prompt/.*", r"backbone/.*")
    elif ablation == "frozen":  # not in the paper: only the embeddings and a bias train
        config.trainable = (r"prompt/.*", r"head/.*")
        config.optim.lr = 3e-2
    return config


def sweep():
    """Yields every run; of each split, the learning rate that is best on dev counts."""
    for task in TASKS:
        for seed in SEEDS:
            for lr in RATES:
                yield {"config": task, "data.seed": seed, "optim.lr": lr}
