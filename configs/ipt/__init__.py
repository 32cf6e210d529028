"""IPT, prompts computed from each text, on RoBERTa-large (Jiang et al. 2022).

A file per table. Its argument is TASK,SYSTEM,PLACE, of which the last may be left out, and what the
table varies behind these: `--config=configs/ipt/end_to_end.py:rte,random,prefix`.

Where the paper and its released code disagree, or both are silent:
- learning rates: 1e-5 in A.3 is that of the frozen backbone, the code's prompts have 0.03; a grid
  around that is searched, and 1e-5 is fine-tuning's;
- on a prefix the code does not shift the positions of the text, and starts the task's prefix from
  N(0, 1); PLACE prefix has the first, and N(0, 0.02^2), as P-tuning v2;
- warm-up: 2,000 steps (A.3) are more than CB's 400, so it is a tenth of the steps;
- the linear layer on the pooler of <s> is trained; the code's is random, fixed, and reads the place
  of the first soft token;
- template: the task's own of a linear layer; the code's has a mask that is not read;
- on a prefix the paper has keys and values of the text in each layer (sections 3 and 4.1: what the
  strategy computes, and nothing else trains), the code has them in the first layer alone, times
  0.05, added to a prefix of the task: PLACE is prefix_paper or prefix, which the tables take;
- soft tokens are of words of the text alone; the code has padding and <s> among its 100;
- dev is 10% of train; the code selects on the validation split, which is its test split too;
- few-shot: 32 examples per class (5.1), not 32 in all (A.3).
"""

from typing import NamedTuple

from configs.base import get_config as base
from configs.parts import heads, methods
from jaxprompt.errors import InputError, check_known

SEEDS = (0, 1, 2, 3, 4)  # section 5.1: five; which ones it does not say
RATES = (1e-2, 3e-2, 1e-1)  # of prompts, ours around the code's 0.03
FULL_RATES = (1e-5, 2e-5, 5e-5)  # of fine-tuning, ours; A.3: 1e-5
LENGTH = 100  # section 5.6, and released code
UTILIZATION = 0.3  # section 5.6: no gain above 26%
ENCODERS = ("cnn", "lstm", "mlp")  # section 4.2; "RNN" in the tables
# task: the same soft tokens, or keys and values, for every text; ppt: soft tokens that
# configs/ppt/nsp.py pre-trained; full: fine-tuning.
SYSTEMS = ("task", "ppt", "full", "random", "pretrained", *ENCODERS)
# What a text adds to a prefix: to which layers, beside a prefix of the task or alone, times what.
PREFIXES = {
    "prefix": {"layers": "1", "added": True, "coefficient": 0.05, "shift": False},  # released code
    "prefix_paper": {"layers": "", "added": False, "coefficient": 1.0},  # sections 3 and 4.1
}
PLACES = ("prompt", *PREFIXES)


class Training(NamedTuple):
    """How long a task trains: 20 to 100 epochs of all examples (A.3), fewer of larger sets."""

    epochs: float
    metric: str = ""


TASKS = {
    "boolq": Training(20.0),
    "cb": Training(100.0, "accuracy"),
    "rte": Training(60.0),
    "multirc": Training(20.0, "accuracy"),
    "ag_news": Training(20.0),
    "sst2": Training(20.0),
    "imdb": Training(20.0),
}
SUPERGLUE = ("boolq", "cb", "rte", "multirc")  # tables 2 and 3


def read_cell(text, *rest):
    """Returns task, system and place of "TASK,SYSTEM,PLACE", and what else a table names."""
    parts, plain = text.split(","), ("rte", "random", "prompt", *(default for _, default in rest))
    if len(parts) > len(plain):
        form = ",".join(["TASK", "SYSTEM", "PLACE", *(name for name, _ in rest)])
        raise InputError(f"{text!r} has {len(parts)} parts; give {form}")
    task, system, place, *more = (*parts, *plain[len(parts) :])
    check_known("the task", task, TASKS)
    check_known("the system", system, SYSTEMS)
    return task, system, check_known("the place", place, PLACES), *more


def export_of(system, place, folder="topics"):
    """Names the export that a system starts from: the rows of "pretrained" are the CNN's (A.3)."""
    on = place.partition("_")[0]  # both settings on a prefix start from the same
    return f"{folder}/{'cnn' if system == 'pretrained' else system}-{on}"


def tune(task, system, place="prompt", *, length=LENGTH, utilization=UTILIZATION, hidden=0):
    """Returns a run on all examples; `pretrained` and encoders start from `export_of` them."""
    c = base()
    c.backbone.path = "FacebookAI/roberta-large"  # section 5.1
    c.task.name, c.task.metric = task, TASKS[task].metric
    heads.linear(c)
    _method(c, system, place, length, utilization, hidden)
    c.data.protocol = {"name": "fraction", "ratio": 0.9, "holdout": 0.1}
    soft = length if place == "prompt" and system != "full" else 0
    c.data.max_len = 384 + soft  # released code: of the text
    c.data.batch, c.optim.accumulate = 64, 2  # A.3: 32, accumulated twice
    c.optim.schedule = {"name": "warmup_linear", "warmup_ratio": 0.1}
    c.train.total_epochs = TASKS[task].epochs
    return c


def _method(c, system, place, length, utilization, hidden):
    on, added = place.partition("_")[0], PREFIXES.get(place, {})
    if system in ("task", "ppt", "full"):  # the same for every text: nothing is added to it
        check_known(f"the place of {system}", place, ("prompt", "prefix"))
    if system == "full":
        methods.full(c, lr=FULL_RATES[0])
    elif system in ("task", "ppt"):
        if place == "prefix":
            check_known("the system on prefix", system, [name for name in SYSTEMS if name != "ppt"])
            methods.prefix(c, length=length, lr=RATES[1], dropout=0.0, shift=False)
        else:
            methods.soft(c, length=length, lr=RATES[1], start="uniform")
        if system == "ppt":
            c.prompt.init = "prompts/nsp"
    elif system in ENCODERS:
        fields = dict(
            encoder=system, hidden=hidden, utilization=utilization, length=length, **added
        )
        methods.ipt_encoder(c, lr=RATES[1], on=on, pretrained=export_of(system, place), **fields)
    else:
        methods.ipt(c, lr=RATES[1], on=on, length=length, **added)
        c.prompt.pretrained = export_of(system, place) if system == "pretrained" else ""


def few_shot(c, k=32, epochs=400.0):
    """Trains on K examples per class, and keeps the step that is best on as many (5.1)."""
    # CB has 16 of one class.
    c.data.protocol = {"name": "kshot", "k": k, "on_shortage": "use_fewer"}
    c.train.total_epochs, c.train.eval_epochs = epochs, 10.0  # A.3: 100 to 800


def cross_validation(k=32, folds=4):
    """Lists the fields of the runs that choose the hyper-parameters (section 5.1)."""
    return {
        "data.protocol": "kfold", "data.protocol.k": 2 * k, "data.protocol.folds": folds,
        "data.protocol.on_shortage": "use_fewer", "train.test": False,
    }  # fmt: skip
