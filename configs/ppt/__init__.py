"""PPT (Gu et al. 2022): pre-training of prompts, and prompt tuning of T5 and mT5, its baseline.

A size takes TASK or TASK,METHOD of configs/parts/ppt.py as its argument, as in
`--config=configs/ppt/t5_xxl.py:boolq,ppt`; a pre-training task takes a kind of backbone,
`--config=configs/ppt/nsp.py:masked` or `:t5-deep`.
"""

import re
from typing import NamedTuple

from configs.base import get_config as base
from configs.parts import backbones, heads, methods
from configs.parts.ppt import ALL_KINDS, FULL_RATES, METHODS, RATES, SEEDS, TASKS
from jaxprompt.errors import InputError, check_known


def read_cell(text, *, parts=3):
    """Returns task, method and kind of "TASK,METHOD,KIND", of which the first `parts` are asked."""
    given = text.split(",")
    if len(given) > parts:
        form = ",".join(("TASK", "METHOD", "KIND")[:parts])
        raise InputError(f"{text!r} has {len(given)} parts; give {form}")
    task, method, kind = (*given, *("rte", "pt", "t5")[len(given) :])
    check_known("the task", task, TASKS)
    return task, check_known("the method", method, METHODS), kind


def tune(backbone, size, cell, *, model=1):
    """Returns few-shot tuning of a size; `model` devices divide the heads and widths.

    `backbone` is "t5" (1.1, not LM-adapted but for the method lm_adapt) or "mt5".
    """
    task, method, _ = read_cell(cell, parts=2)
    c = base()
    getattr(backbones, "t5_lm" if method == "lm_adapt" else backbone)(c, size)
    METHODS[method](c, task)
    c.backbone.dtype = dtype_of(size)
    if method == "full":
        c.optim.lr = FULL_RATES[size][1]
    c.mesh.model = model
    return c


def dtype_of(backbone):
    """Names the precision: mixed for models of 11B, full for all others (appendix C)."""
    return "bfloat16" if _size_of(backbone) == "xxl" else "float32"


def learning_rates(method, backbone):
    """Lists the learning rates that are searched; those of `full` by the size in a path's name."""
    size = _size_of(backbone)
    return FULL_RATES[size] if method == "full" and size else RATES[method]


def _size_of(backbone):
    """Reads the size in the name of a T5 or mT5; "" of another model."""
    words = re.split(r"[^a-z0-9]+", backbone.rpartition("/")[2].lower())
    size = next((word for word in words if word in FULL_RATES), "")
    return size if words == [size] or {"t5", "mt5"} & set(words) else ""


def has_cell(method, task):
    """Tells whether a method is for a task: topics are no words of a pre-trained prompt."""
    return method not in ("ppt", "hybrid_ppt") or not TASKS[task].topics


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


def pretrain(task, kind="t5"):
    """Returns pre-training of a prompt; give corpus.path and backbone.path, and for a model of 11B
    backbone.dtype=bfloat16 (appendix C).

    `kind` is "t5" (mT5 too), "masked" (a BERT and its kin, with a masked-LM head), "causal" or
    "infilling" (GLM); with "-deep" behind it keys and values of every layer are learned in place of
    soft tokens.
    """
    check_known("the kind of backbone", kind, ALL_KINDS)
    recipe, (kind, deep) = PRETRAINING[task], ALL_KINDS[kind]
    c = base()
    c.backbone.dropout = 0.0
    c.backbone.rescale = kind.rescale
    c.ppt.task, c.ppt.patterns = task, kind.patterns("en")
    heads.verbalizer(c, scores="full", span="target")
    c.task.answer, c.task.eos = kind.answer, False  # the loss is over sentinels too
    if deep:  # not published: the learning rate is chosen as for the kinds that are not T5
        methods.prefix(c, length=100, lr=0.1, dropout=0.0)
    else:
        methods.soft(c, length=100, lr=kind.lr, start="normal")
        c.prompt.scale = kind.scale
    c.data.max_len = min(recipe.max_len, kind.positions - 100 * deep)
    c.data.batch = c.data.eval_batch = 128  # 64 a group of 4 GPUs on 8 of them
    c.corpus.held_out = 0.05
    c.corpus.dev_rows = 100 * 128  # 100 batches
    c.optim.schedule = {"name": "inverse_sqrt"}
    c.optim.weight_decay = 1e-2  # of soft tokens too
    c.optim.clip = 1.0
    c.train.total_epochs, c.train.total_steps = 0.0, recipe.steps
    c.train.eval_steps = c.train.save_steps = 2_000
    return c


def sweep():
    """Yields the five seeds; each draws its own examples."""
    for seed in SEEDS:
        yield {"seed": seed, "data.seed": seed}
