"""PPT (Gu et al. 2022): pre-training of prompts, and prompt tuning of T5 and mT5, its baseline.

A baseline's config takes a task as its argument, `--config=configs/ppt/t5_xxl.py:boolq`; that of a
pre-training task a kind of backbone, `--config=configs/ppt/nsp.py:masked` or `:t5-deep`.
"""

from typing import NamedTuple

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


class Pretraining(NamedTuple):
    """A task of pre-training, as the released code has it."""

    max_len: int  # tokens, the 100 soft ones included
    steps: int  # of the prompt that was released


PRETRAINING = {
    "nsp": Pretraining(512, 8_000),
    "nss": Pretraining(1024, 8_000),
    "unified": Pretraining(768, 16_000),
    "cls": Pretraining(368, 22_000),
}


class Kind(NamedTuple):
    """What depends on the scale of a backbone's embeddings, and its positions."""

    rescale: float
    scale: float  # of the first prompt
    lr: float
    positions: int


KINDS = {
    "t5": Kind(100.0, 5e-3, 0.1, 2048),  # as `tune`; the rate is the released code's
    # Not published: after 100 steps the rate is the one of a soft prompt in parts/methods.py.
    "masked": Kind(1.0, 0.02, 0.3, 512),
    "causal": Kind(1.0, 0.02, 0.3, 1024),
}


def pretrain(task, kind="t5"):
    """Returns pre-training of a prompt; give corpus.path and backbone.path.

    `kind` is "t5" (mT5 too), "masked" (a BERT and its kin, with a masked-LM head) or "causal"; with
    "-deep" behind it keys and values of every layer are learned in place of soft tokens.
    """
    kind, deep, _ = kind.partition("-deep")
    own, kind = PRETRAINING[task], KINDS[kind]
    c = base()
    c.backbone.dtype = "bfloat16"
    c.backbone.dropout = 0.0
    c.backbone.rescale = kind.rescale
    c.ppt.task = task
    c.head.name, c.head.scores, c.head.span = "verbalizer", "full", "target"
    c.task.answer, c.task.eos = "[mask] {label} [mask]", False  # the loss is over all three
    if deep:  # its numbers are not divided; not published, the rate is chosen like those above
        methods.prefix(c, length=100, lr=0.1, dropout=0.0)
    else:
        methods.soft(c, length=100, lr=kind.lr, start="normal")
        c.prompt.scale = kind.scale
    c.data.max_len = min(own.max_len, kind.positions - 100 * bool(deep))
    c.data.batch = c.data.eval_batch = 128  # 64 a group of 4 GPUs on 8 of them
    c.corpus.held_out = 0.05
    c.corpus.dev_rows = 100 * 128  # 100 batches
    c.optim.schedule = "inverse_sqrt"
    c.optim.weight_decay = 1e-2  # of soft tokens too
    c.optim.clip = 1.0
    c.train.total_epochs, c.train.total_steps = 0.0, own.steps
    c.train.eval_steps = c.train.save_steps = 2_000
    return c


def sweep():
    """Yields the five seeds; the rows are drawn anew with each."""
    for seed in SEEDS:
        yield {"seed": seed, "data.seed": seed}
