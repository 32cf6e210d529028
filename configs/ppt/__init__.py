"""PPT (Gu et al. 2022): pre-training of prompts, and prompt tuning of T5 and mT5.

The argument of a model (t5_small.py ... mt5_xxl.py) is TASK,METHOD of configs/parts/ppt.py:
`--config=configs/ppt/t5_xxl.py:boolq,ppt`. The argument of a pre-training task (nsp.py, nss.py,
cls.py, unified.py) is a kind of backbone: `--config=configs/ppt/nsp.py:masked` or `:t5-deep`.
"""

import re
from typing import NamedTuple

from configs.base import paper as base
from configs.parts import backbones, heads, methods
from configs.parts.ppt import ALL_KINDS, FULL_RATES, METHODS, RATES, SEEDS, TASKS
from jaxprompt.config.load import read_argument
from jaxprompt.errors import check_known


def tune(backbone, size, cell, *, model=1):
    """Returns a few-shot run.

    Args:
      backbone: "t5" (version 1.1; LM-adapted for the method lm_adapt) or "mt5".
      size: "small" to "xxl".
      cell: "TASK,METHOD".
      model: size of the mesh axis that divides heads and widths.
    """
    task, method = read_argument(cell, TASK=("rte", TASKS), METHOD=("pt", METHODS))
    config = base()
    getattr(backbones, "t5_lm" if method == "lm_adapt" else backbone)(config, size)
    METHODS[method](config, task)
    config.backbone.dtype = dtype_of(size)
    if method == "full":
        config.optim.lr = FULL_RATES[size][1]
    config.mesh.model = model
    return config


def dtype_of(backbone):
    """Returns the dtype: mixed precision for models of 11B, float32 for the others (appendix C)."""
    return "bfloat16" if _size_of(backbone) == "xxl" else "float32"


def learning_rates(method, backbone):
    """Returns the learning rates to search; those of `full` depend on the size in a path's name."""
    size = _size_of(backbone)
    return FULL_RATES[size] if method == "full" and size else RATES[method]


def _size_of(backbone):
    """Returns the size in the name of a T5 or mT5, "" for other models."""
    words = re.split(r"[^a-z0-9]+", backbone.rpartition("/")[2].lower())
    size = next((word for word in words if word in FULL_RATES), "")
    return size if words == [size] or {"t5", "mt5"} & set(words) else ""


def has_cell(method, task):
    """Returns whether the paper has a method for a task: `ppt` has no topic words (section 4.2)."""
    return method not in ("ppt", "hybrid_ppt") or not TASKS[task].topics


class Pretraining(NamedTuple):
    """Values of a pre-training task in the released code."""

    max_len: int  # tokens, including the 100 soft tokens
    steps: int  # of the released prompt


PRETRAINING = {
    "nsp": Pretraining(512, 8_000),
    "nss": Pretraining(1024, 8_000),
    "unified": Pretraining(768, 16_000),
    "cls": Pretraining(368, 22_000),
}


def pretrain(task, kind="t5"):
    """Returns pre-training of a prompt; set corpus.path and backbone.path.

    For a model of 11B, also set backbone.dtype=bfloat16 (appendix C).

    Args:
      task: "nsp", "nss", "cls" or "unified".
      kind: "t5" (also mT5), "masked" (BERT and similar, with a masked-LM head), "causal" or
        "infilling" (GLM); "-deep" at its end trains keys and values of every layer instead of soft
        tokens.
    """
    check_known("the kind of backbone", kind, ALL_KINDS)
    recipe, (kind, deep) = PRETRAINING[task], ALL_KINDS[kind]
    config = base()
    config.backbone.dropout = 0.0
    config.backbone.rescale = kind.rescale
    config.ppt.task, config.ppt.patterns = task, kind.patterns("en")
    heads.verbalizer(config, scores="full", span="target")
    config.task.answer, config.task.eos = kind.answer, False  # the loss includes the sentinels
    if deep:  # not published; the learning rate is chosen as for the other backbones than T5
        methods.prefix(config, length=100, lr=0.1, dropout=0.0)
    else:
        methods.soft(config, length=100, lr=kind.lr, start="normal")
        config.prompt.scale = kind.scale
    config.data.max_len = min(recipe.max_len, kind.positions - 100 * deep)
    config.data.batch = config.data.eval_batch = 128  # 2 groups of 4 GPUs, 64 each
    config.corpus.held_out = 0.05
    config.corpus.dev_rows = 100 * 128  # 100 batches
    config.optim.schedule = {"name": "inverse_sqrt"}
    config.optim.weight_decay = 1e-2  # includes the soft tokens
    config.optim.clip = 1.0
    config.train.total_epochs, config.train.total_steps = 0.0, recipe.steps
    config.train.eval_steps = config.train.save_steps = 2_000
    return config


def sweep():
    """Yields the five seeds; each samples its own examples."""
    for seed in SEEDS:
        yield {"seed": seed, "data.seed": seed}
