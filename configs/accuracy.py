"""Accuracy on real data with small BERTs: full data and 16 examples per class, three seeds.

The argument is TASK-METHOD or TASK-METHOD-16: `--config=configs/accuracy.py:trec-prefix-16`. Tasks:
trec, sst2, mpqa, and sst2_mlm, which scores label words with a backbone's own MLM head; on all data
alone cola, mrpc, rte, wic, copa, boolq, conll2003 (tags) and squad (spans). Length and learning
rate of each method were found on trec's dev. prefix_as_peft starts from N(0, 1) and takes batches
in random order, as PEFT's side of launch/accuracy does.
"""

from configs.base import get_config as base
from configs.parts import backbones, heads, methods, tasks
from jaxprompt.errors import InputError, check_known

SEEDS = (0, 1, 2)
DATA_SEEDS = (13, 21, 42)  # of the listed 16-shot rows
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
FEW = ("trec", "sst2", "sst2_mlm")  # with listed rows of 16 per class


def read_name(name):
    """Returns task, method and whether 16 examples per class are taken."""
    task, *rest = name.split("-")
    method, *few = rest or [""]
    check_known("the task", task, EPOCHS)
    check_known("the method", method, EPOCHS[task])
    if few not in ([], ["16"]):
        raise InputError(f"{name!r} ends with {'-'.join(few)!r}; give TASK-METHOD-16, or no number")
    if few and task not in FEW:
        raise InputError(f"{name!r}: {task} has no rows of 16 per class; give {task}-{method}")
    return task, method, bool(few)


def get_config(name="trec-prefix"):
    """Returns one run of the table."""
    task, method, few = read_name(name)
    epochs, as_peft = EPOCHS[task][method], method.endswith("_as_peft")
    method = method.removesuffix("_as_peft")
    c = base()
    getattr(tasks, task.removesuffix("_mlm"))(c)
    if task == "sst2_mlm":
        heads.verbalizer(c)
        c.task.words = ("bad", "good")
        c.task.template = "{sentence} [mask]." if method == "soft" else "{sentence} It was [mask]."
    else:
        backbones.minilm(c)
    getattr(methods, "soft" if method == "hybrid" else method)(c, lr=RATE[method])
    if method in LENGTH:
        c.prompt.length = LENGTH[method]
    if method in ("soft", "hybrid"):
        c.prompt.top = 5_000  # the most common tokens, as Lester et al. (2021) take them
    if method == "prefix":
        c.prompt.dropout = 0.0
    c.data.group = 8
    if as_peft:
        c.prompt.scale = 1.0
        c.data.group = 1
    c.train.total_epochs = epochs
    if few:
        c.data.protocol = {"name": "listed"}
        c.data.batch = 16
        c.data.group = 1
        c.train.total_epochs = 0.0
        c.train.total_steps = 60 if method == "full" else 200 if task == "trec" else 100
        c.train.eval_steps = 20
    return c


def sweep():
    """Yields every run."""
    for task, epochs in EPOCHS.items():
        for method in epochs:
            for seed, data_seed in zip(SEEDS, DATA_SEEDS, strict=True):
                yield {"config": f"{task}-{method}", "seed": seed}
                if task in FEW and not method.endswith("_as_peft"):
                    yield {"config": f"{task}-{method}-16", "seed": seed, "data.seed": data_seed}
