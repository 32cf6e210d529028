"""P-tuning on 32 examples of SuperGLUE's tasks (Liu et al. 2021, section 4.3; PT-Fewshot).

The argument is TASK, or TASK,frozen: `--config=p_tuning/superglue:rte`. Backbone and pseudo tokens
are tuned together, as published; `frozen` trains the pseudo tokens alone. Give another backbone
than the paper's by backbone.path. The 32 examples of FewGLUE are given by data.files, with
data.protocol=''; without them as many are sampled from the task's own. Numbers without a section
are those of the released code, and so are the patterns: [soft*n] stands where it has pseudo tokens.

Two patterns end otherwise than there, where masks take the tokens of a row's own answer: label
words here are the same for all rows. COPA names its choices A and B, and [mask] takes a name; WSC
asks whether the pronoun refers to the noun phrase, yes or no. The 32 examples of FewGLUE's WSC are
all of class true, which teaches the latter nothing: sample from the task's own. MultiRC is measured
by F1 over all answers (F1a). Of equal scores on dev the first counts here, there the last.
"""

from typing import NamedTuple

from configs.base import get_config as base
from configs.parts import heads, methods
from jaxprompt.errors import check_known

SEEDS = (0, 1, 2)  # it repeats each run 3 times


class Recipe(NamedTuple):
    """A pattern, and how it is trained."""

    template: str
    rate: float  # of the pseudo tokens
    steps: int
    length: int = 1
    warmup: int = 0
    max_len: int = 256


WSC = (
    "[soft*1] {text|marked} [soft*1] pronoun '* {span2_text|whole} *' refers to {span1_text|whole}?"
    " [mask]."
)
TASKS = {
    "boolq": Recipe("{passage}. [soft*1] Question: {question}? Answer: [mask].", 1e-4, 250),
    "rte": Recipe("{premise} Question: {hypothesis}? [soft*1] Answer: [mask].", 1e-4, 3500, 1, 150),
    "cb": Recipe("{premise} [sep] {hypothesis}? [soft*1] answer: [mask]", 1e-5, 250),
    "wic": Recipe("{sentence1} [sep] {sentence2} [soft*1] {word}? [mask]", 1e-5, 3500),
    "multirc": Recipe(
        "{paragraph}. Question: {question|whole}? Is it {answer|whole}? [soft*1] [mask].",
        1e-4, 250, max_len=512,
    ),
    "copa": Recipe(
        "{choices|lower|chop}? {premise|chop} {connective} [soft*1] [mask].",
        1e-5, 3500, max_len=96,
    ),
    "wsc": Recipe(WSC, 1e-4, 3500, length=2, max_len=128),
}  # fmt: skip


def get_config(name="rte"):
    """Returns one run."""
    task, _, body = name.partition(",")
    recipe = TASKS[check_known("the task", task, TASKS)]
    check_known("the body", body, ("", "frozen"))
    c = base()
    c.backbone.path = "albert/albert-xxlarge-v2"
    c.task.name, c.task.template = task, recipe.template
    methods.p_tuning(c, length=recipe.length, lr=recipe.rate)
    heads.verbalizer(c)
    if body == "frozen":
        c.optim.lr = 1e-3  # not the paper's
    else:
        c.trainable = (r"prompt/.*", r"backbone/.*")
        c.optim.lr_backbone, c.optim.weight_decay = 1e-5, 0.1
        c.optim.no_decay += (r"prompt/.*",)  # the optimizer of the pseudo tokens has none
    c.optim.schedule = {"name": "linear"}
    if recipe.warmup:
        c.optim.schedule = {"name": "warmup_linear", "warmup_steps": recipe.warmup}
    c.optim.clip = 1.0
    c.data.protocol = {"name": "balanced", "n": 32}
    c.data.max_len, c.data.batch = recipe.max_len, 16
    c.train.total_epochs, c.train.total_steps = 0.0, recipe.steps
    c.train.eval_steps, c.train.patience = 20, 10
    return c


def sweep():
    """Yields every run."""
    for task in TASKS:
        for seed in SEEDS:
            yield {"config": task, "seed": seed}
