"""P-tuning on 32 examples of SuperGLUE's tasks (Liu et al. 2021, section 4.3; PT-Fewshot).

The argument is TASK or TASK,frozen: `--config=p_tuning/superglue:rte`. Backbone and pseudo tokens
are tuned together, as published; `frozen` trains only the pseudo tokens. 32 examples are sampled
from the task; to use those of FewGLUE, set data.files and data.protocol=''. Patterns, and values
without a section, are those of the released code; [soft*n] marks its pseudo tokens.

Two patterns end differently, because label words here are the same for all examples, while the code
predicts the tokens of each example's answer. COPA names its choices A and B, and [mask] is one of
these; WSC asks whether the pronoun refers to the noun phrase, yes or no. The 32 examples of
FewGLUE's WSC are all true, so use sampled ones. MultiRC is measured by F1 over all answers (F1a).
Of equal dev scores, the first is selected here, and the last in the code.
"""

from typing import NamedTuple

from configs.base import paper as base
from configs.parts import heads, methods
from jaxprompt.config.load import read_argument

SEEDS = (0, 1, 2)  # the code repeats each run 3 times


class Recipe(NamedTuple):
    """Pattern and training of a task."""

    template: str
    rate: float  # learning rate of the pseudo tokens
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


def get_config(argument=""):
    """Returns one run."""
    task, backbone = read_argument(argument, TASK=("rte", TASKS), BACKBONE=("", ("", "frozen")))
    recipe = TASKS[task]
    config = base()
    config.backbone.path = "albert/albert-xxlarge-v2"
    config.task.name, config.task.template = task, recipe.template
    methods.p_tuning(config, length=recipe.length, lr=recipe.rate)
    heads.verbalizer(config)
    if backbone == "frozen":
        config.optim.lr = 1e-3  # not in the paper
    else:
        config.trainable = (r"prompt/.*", r"backbone/.*")
        config.optim.lr_backbone, config.optim.weight_decay = 1e-5, 0.1
        config.optim.no_decay += (r"prompt/.*",)  # pseudo tokens have no weight decay
    config.optim.schedule = {"name": "linear"}
    if recipe.warmup:
        config.optim.schedule = {"name": "warmup_linear", "warmup_steps": recipe.warmup}
    config.optim.clip = 1.0
    config.data.protocol = {"name": "balanced", "n": 32}
    config.data.max_len, config.data.batch = recipe.max_len, 16
    config.train.total_epochs, config.train.total_steps = 0.0, recipe.steps
    config.train.eval_steps, config.train.patience = 20, 10
    return config


def sweep():
    """Yields every run."""
    for task in TASKS:
        for seed in SEEDS:
            yield {"config": task, "seed": seed}
