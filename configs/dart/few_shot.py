"""DART with 16 examples per class (Zhang et al. 2022, section 5.2 and appendix A).

The argument is TASK, or TASK,ABLATION: `--config=dart/few_shot:sst2`,
`--config=dart/few_shot:trec,no_fluency`; the ablation `p_tuning` is what the paper compares with,
and `full` is fine-tuning with DART's schedule; the paper's numbers of fine-tuning are of
configs/dart/lm_bff.py:TASK,full. The words of a task's template are trained rows, and so are its
label words (appendix A.2). Subj's label words are those of Gao et al. 2021, table 1, subjective and
objective; appendix A.2 has incorrect and correct. Between text and template eq. 1 has a [SEP],
which appendix A.2, LM-BFF and the first released code have not; `[sep]` in task.template writes it.
The paper's grid (appendix A.1) is of weight decay, epochs, batch size and accumulation too; a run
has one value of each, and the best epoch on dev counts. The backbone is the paper's; give another
by backbone.path.
"""

from typing import NamedTuple

from configs.base import get_config as base
from configs.parts import heads, methods
from jaxprompt.config.open_blocks import make_block
from jaxprompt.errors import check_known

SEEDS = (13, 21, 42, 87, 100)  # section 5.2: the splits of LM-BFF
RATES = (1e-5, 5e-5, 1e-4, 2e-4)  # appendix A.1
FULL_RATES = (1e-5, 2e-5, 5e-5)  # of fine-tuning, as in Gao et al. 2021, appendix A


class Words(NamedTuple):
    """A template whose words are rows, and the words that these start from."""

    template: str
    text: str
    length: int
    epochs: float = 20.0  # appendix A.1: the first of its grid
    max_len: int = 128


_IT_WAS = "[soft*2] [mask][soft*1]"
_NLI = 30.0, 256  # appendix A.1, of mnli and snli


def _pair(first, second, *more):
    # Appendix A.2. Gao et al. 2021 have no "?" for mrpc and qqp.
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
# Section 5.4, table 3; and what the paper compares with, or has not.
ABLATIONS = ("", "no_fluency", "fixed_template", "fixed_labels", "frozen", "full", "p_tuning")


def get_config(name="sst2"):
    """Returns one run."""
    task, _, ablation = name.partition(",")
    prompt_words = TASKS[check_known("the task", task, TASKS)]
    check_known("the ablation", ablation, ABLATIONS)
    c = base()
    if ablation == "full":  # fine-tuning with a linear head, the text alone
        heads.linear(c)
        methods.full(c, lr=FULL_RATES[0])
    else:
        methods.dart(c, length=prompt_words.length, text=prompt_words.text, lr=RATES[0])
        c.task.template = prompt_words.template
    c.backbone.path = "FacebookAI/roberta-large"
    c.task.name = task
    c.data.protocol = {"name": "kshot", "k": 16}
    c.data.max_len, c.data.batch = (
        prompt_words.max_len,
        8,
    )  # a batch that all grids of appendix A.1 have
    c.optim.schedule = {"name": "warmup_linear", "warmup_ratio": 0.1}
    c.train.total_epochs = prompt_words.epochs
    c.train.eval_epochs = 1.0
    if ablation == "no_fluency":
        c.prompt.fluency = 0.0
    elif ablation == "fixed_template":
        c.trainable = (r"prompt/rows", r"head/.*", r"backbone/.*")
    elif ablation == "p_tuning":  # no word is an anchor (appendix A)
        heads.verbalizer(c)
        c.prompt = make_block("prompt", "p_tuning", length=prompt_words.length)
        c.trainable = (r"prompt/.*", r"backbone/.*")
    elif ablation == "fixed_labels":
        heads.verbalizer(c)
        c.prompt = make_block(
            "prompt",
            "dart",
            length=prompt_words.length,
            text=prompt_words.text,
            fluency=1.0,
            labels=False,
        )
        c.trainable = (r"prompt/.*", r"backbone/.*")
    elif ablation == "frozen":  # not the paper's: the rows and a bias alone
        c.trainable = (r"prompt/.*", r"head/.*")
        c.optim.lr = 3e-2
    return c


def sweep():
    """Yields every run; of each split the learning rate that is best on dev counts."""
    for task in TASKS:
        for seed in SEEDS:
            for lr in RATES:
                yield {"config": task, "data.seed": seed, "optim.lr": lr}
