"""Accuracy on real data with small BERTs: all examples or 16 per class, three seeds.

The argument is TASK-METHOD or TASK-METHOD-16: `--config=configs/accuracy.py:trec-prefix-16`. The
tasks trec, sst2 and sst2_mlm (label words with the backbone's MLM head) have both; the others only
all examples. Length and learning rate of each method were chosen on the dev split of trec.
prefix_as_peft has PEFT's initialisation, N(0, 1), and random batches, as launch/accuracy's run of
PEFT has.
"""

from configs.base import get_config as base
from configs.parts import backbones, heads, methods, tasks
from jaxprompt.errors import InputError, check_known

SEEDS = (0, 1, 2)
DATA_SEEDS = (13, 21, 42)  # of the listed 16-shot samples
LENGTH = {"prefix": 16, "soft": 10, "hybrid": 10}
RATE = {"prefix": 4e-2, "soft": 3e-2, "hybrid": 3e-2, "head_only": 1e-1, "full": 5e-5}
EPOCHS = {
    "trec": {"prefix": 6.0, "prefix_as_peft": 6.0, "soft": 3.0, "head_only": 5.0, "full": 3.0},
    "sst2": {"prefix": 2.0, "soft": 3.0, "head_only": 6.0, "full": 1.0},
    "mpqa": {"prefix": 2.0, "soft": 1.0, "head_only": 2.0, "full": 1.0},
    "sst2_mlm": {"prefix": 1.0, "soft": 1.0, "hybrid": 1.0, "full": 1.0},
    "cola": {"prefix": 2.0, "soft": 2.0, "head_only": 4.0, "full": 1.0},
    "mrpc": {"prefix": 2.0, "soft": 2.0, "head_only": 5.0, "full": 1.0},
    "rte": {"prefix": 2.0, "prefix_as_peft": 2.0, "soft": 2.0, "head_only": 5.0, "full": 1.0},
    "wic": {"prefix": 2.0, "soft": 2.0, "head_only": 5.0, "full": 1.0},
    "copa": {"prefix": 8.0, "soft": 8.0, "head_only": 8.0, "full": 4.0},
    "boolq": {"prefix": 2.0, "soft": 2.0, "head_only": 5.0, "full": 1.0},
    "conll2003": {
        "prefix": 2.0, "prefix_as_peft": 2.0, "soft": 2.0, "head_only": 4.0, "full": 1.0,
    },
    "squad": {"prefix": 1.0, "prefix_as_peft": 1.0, "soft": 1.0, "head_only": 1.0, "full": 1.0},
}  # fmt: skip
FEW = ("trec", "sst2", "sst2_mlm")  # with listed 16-shot samples


def read_name(name):
    """Returns task, method and whether there are 16 examples per class."""
    task, *rest = name.split("-")
    method, *few = rest or [""]
    check_known("the task", task, EPOCHS)
    check_known("the method", method, EPOCHS[task])
    if few not in ([], ["16"]):
        raise InputError(f"{name!r} ends with {'-'.join(few)!r}; use TASK-METHOD-16 or TASK-METHOD")
    if few and task not in FEW:
        raise InputError(f"{name!r}: {task} has no 16-shot samples; use {task}-{method}")
    return task, method, bool(few)


def get_config(name="trec-prefix"):
    """Returns one run of the table."""
    task, method, few = read_name(name)
    epochs, as_peft = EPOCHS[task][method], method.endswith("_as_peft")
    method = method.removesuffix("_as_peft")
    config = base()
    getattr(tasks, task.removesuffix("_mlm"))(config)
    if task == "sst2_mlm":
        heads.verbalizer(config)
        config.task.words = ("bad", "good")
        config.task.template = (
            "{sentence} [mask]." if method == "soft" else "{sentence} It was [mask]."
        )
    else:
        backbones.minilm(config)
    getattr(methods, "soft" if method == "hybrid" else method)(config, lr=RATE[method])
    if method in LENGTH:
        config.prompt.length = LENGTH[method]
    if method in ("soft", "hybrid"):
        config.prompt.top = 5_000  # the most common tokens (Lester et al. 2021)
    if method == "prefix":
        config.prompt.dropout = 0.0
    if as_peft:
        config.prompt.scale = 1.0
        config.data.group = 1
    config.train.total_epochs = epochs
    if few:
        config.data.protocol = {"name": "listed"}
        config.data.batch = 16
        config.train.total_epochs = 0.0
        config.train.total_steps = 60 if method == "full" else 200 if task == "trec" else 100
        config.train.eval_steps = 20
    return config


def sweep():
    """Yields every run."""
    for task, epochs in EPOCHS.items():
        for method in epochs:
            for seed, data_seed in zip(SEEDS, DATA_SEEDS, strict=True):
                yield {"config": f"{task}-{method}", "seed": seed}
                if task in FEW and not method.endswith("_as_peft"):
                    yield {"config": f"{task}-{method}-16", "seed": seed, "data.seed": data_seed}
