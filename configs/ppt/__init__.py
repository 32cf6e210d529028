"""Prompt tuning of T5 and mT5 as the baseline of PPT has it (Gu et al. 2022, section 5.1).

A config of this folder takes a task as its argument: `--config=configs/ppt/t5_xxl.py:boolq`.
"""

from configs.base import get_config as base
from configs.parts import backbones, methods

SEEDS = (10, 20, 30, 40, 50)
# Template, label words in the order of the task's classes, rate: as in the released code, where
# nothing but the sentinel stands among the texts.
TASKS = {
    "boolq": ("{question} [mask] {passage}", ("no", "yes"), 5e-3),
    "cb": ("{hypothesis} [mask] {premise}", ("yes", "no", "maybe"), 5e-2),
    "rte": ("{premise} [mask] {hypothesis}", ("yes", "no"), 5e-3),
    "sst2": ("{sentence} [mask]", ("bad", "good"), 1e-2),
    "sst5": ("{text} [mask]", ("terrible", "bad", "maybe", "good", "great"), 1e-2),
    "lcqmc": ("{sentence1} [mask] {sentence2}", ("不同", "相同"), 5e-3),
    "chnsenticorp": ("{text} [mask]", ("差", "好"), 1e-2),
}


def tune(backbone, size, task, *, model=1):
    """Returns few-shot prompt tuning of a size; `model` devices divide the heads and widths.

    `backbone` is "t5" (1.1, not LM-adapted) or "mt5".
    """
    c = base()
    getattr(backbones, backbone)(c, size)
    c.backbone.dtype = "bfloat16"
    c.backbone.dropout = 0.0
    # Divided for float16 there; the rates below and the scale of the start are of that space.
    c.backbone.rescale = 100.0
    c.mesh.model = model
    template, words, rate = TASKS[task]
    c.task.name, c.task.template, c.task.words = task, template, words
    c.task.eos = False
    c.head.name, c.head.scores, c.head.span = "verbalizer", "full", "target"
    methods.soft(c, length=100, lr=rate, start="normal")  # section 5.1: 100 soft tokens
    c.prompt.scale = 5e-3  # 0.5 in T5's own space, near what its embeddings have
    c.data.protocol, c.data.n = "balanced", 32  # section 5.1: 32 rows, as many for dev
    c.data.max_len, c.data.multiple = 512, 64
    c.data.batch = 16  # 8 a group of 4 GPUs on 8 of them (few-shot scripts), as below
    c.optim.schedule = "constant"
    c.optim.weight_decay = 1e-2  # of soft tokens too
    c.optim.clip = 1.0
    c.train.total_epochs = 50.0
    c.train.eval_steps = 6
    return c


def sweep():
    """Yields the five seeds; the rows are drawn anew with each."""
    for seed in SEEDS:
        yield {"seed": seed, "data.seed": seed}
