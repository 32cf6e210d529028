"""IPT, prompts computed from each text, on RoBERTa-large (Jiang et al. 2022).

Each table has its own file. The argument is TASK,SYSTEM,PLACE, followed by what the table varies:
`--config=configs/ipt/end_to_end.py:rte,random,prefix`. Parts at the end can be left out.

Choices, where the paper and its released code disagree or say nothing:
- Learning rates: the 1e-5 of A.3 belongs to the backbone, which is frozen; the code trains prompts
  with 0.03. Prompts are searched around 0.03; fine-tuning uses 1e-5.
- Place `prefix` is the released code: keys and values of the text only in the first layer, times
  0.05, added to a prefix of the task, with the positions of the text not shifted. Place
  `prefix_paper` has keys and values of the text in every layer, and nothing else trains (sections 3
  and 4.1). The tables use `prefix`.
- A prefix of the task starts from N(0, 0.02^2), as in P-tuning v2; the code has N(0, 1).
- Warm-up takes a tenth of the steps: the 2,000 steps of A.3 are more than CB's 400 steps in all.
- The linear layer reads the pooler of <s> and is trained; the code's is random and fixed, and reads
  the position of the first soft token.
- The template is the task's template for a linear layer; the code's has a mask that nothing reads.
- Soft tokens are computed from words of the text only; the code's 100 include padding and <s>.
- Dev is 10% of train; the code selects on the validation split, which is also its test split.
- Few-shot means 32 examples per class (5.1), not 32 in all (A.3).
"""

from typing import NamedTuple

from configs.base import paper as base
from configs.parts import heads, methods
from jaxprompt.config.load import read_argument
from jaxprompt.errors import check_known

SEEDS = (0, 1, 2, 3, 4)  # section 5.1: five, not named
RATES = (1e-2, 3e-2, 1e-1)  # learning rates of prompts: our grid around the code's 0.03
FULL_RATES = (1e-5, 2e-5, 5e-5)  # learning rates of fine-tuning: our grid; A.3 has 1e-5
LENGTH = 100  # section 5.6 and released code
UTILIZATION = 0.3  # section 5.6: no gain above 26%
ENCODERS = ("cnn", "lstm", "mlp")  # section 4.2; "RNN" in the tables
# task: one prompt for all texts; ppt: one prompt, pre-trained by configs/ppt/nsp.py;
# full: fine-tuning; the others compute a prompt from each text.
SYSTEMS = ("task", "ppt", "full", "random", "pretrained", *ENCODERS)
# How the keys and values of a text enter the prefix: in which layers, added to a prefix of the task
# or alone, and multiplied by which factor.
PREFIXES = {
    "prefix": {"layers": "1", "added": True, "coefficient": 0.05, "shift": False},  # released code
    "prefix_paper": {"layers": "", "added": False, "coefficient": 1.0},  # sections 3 and 4.1
}
PLACES = ("prompt", *PREFIXES)


class Training(NamedTuple):
    """Length of training: 20 to 100 epochs of all examples (A.3), fewer for larger data sets."""

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


def read_cell(text, *, tasks=TASKS, systems=SYSTEMS, default=("rte", "random", "prompt"), **more):
    """Returns task, system and place, and the further parts `more` of a table's argument."""
    task, system, place = default
    return read_argument(
        text, TASK=(task, tasks), SYSTEM=(system, systems), PLACE=(place, PLACES), **more
    )


def export_of(system, place, folder="topics"):
    """Returns the export that a system starts from; `pretrained` has the rows of the CNN (A.3)."""
    on = place.partition("_")[0]  # both prefix settings start from the same export
    return f"{folder}/{'cnn' if system == 'pretrained' else system}-{on}"


def tune(task, system, place="prompt", *, length=LENGTH, utilization=UTILIZATION, hidden=0):
    """Returns a run on all examples; `pretrained` and the encoders start from an export."""
    config = base()
    config.backbone.path = "FacebookAI/roberta-large"  # section 5.1
    config.task.name, config.task.metric = task, TASKS[task].metric
    heads.linear(config)
    _method(config, system, place, length, utilization, hidden)
    config.data.protocol = {"name": "fraction", "ratio": 0.9, "holdout": 0.1}
    soft = length if place == "prompt" and system != "full" else 0
    config.data.max_len = 384 + soft  # released code: 384 for the text
    config.data.batch, config.optim.accumulate = 64, 2  # A.3: 32, accumulated twice
    config.optim.schedule = {"name": "warmup_linear", "warmup_ratio": 0.1}
    config.train.total_epochs = TASKS[task].epochs
    return config


def _method(config, system, place, length, utilization, hidden):
    on, added = place.partition("_")[0], PREFIXES.get(place, {})
    if system in ("task", "ppt", "full"):  # one prompt for all texts
        check_known(f"the place of {system}", place, ("prompt", "prefix"))
    if system == "full":
        methods.full(config, lr=FULL_RATES[0])
    elif system in ("task", "ppt"):
        if place == "prefix":
            check_known("the system on prefix", system, [name for name in SYSTEMS if name != "ppt"])
            methods.prefix(config, length=length, lr=RATES[1], dropout=0.0, shift=False)
        else:
            methods.soft(config, length=length, lr=RATES[1], start="uniform")
        if system == "ppt":
            config.prompt.init = "prompts/nsp"
    elif system in ENCODERS:
        fields = dict(
            encoder=system, hidden=hidden, utilization=utilization, length=length, **added
        )
        methods.ipt_encoder(
            config, lr=RATES[1], on=on, pretrained=export_of(system, place), **fields
        )
    else:
        methods.ipt(config, lr=RATES[1], on=on, length=length, **added)
        config.prompt.pretrained = export_of(system, place) if system == "pretrained" else ""


def few_shot(config, k=32, epochs=400.0):
    """Trains on K examples per class and keeps the step that is best on K more (5.1)."""
    # CB has only 16 examples of one class.
    config.data.protocol = {"name": "kshot", "k": k, "on_shortage": "use_fewer"}
    config.train.total_epochs, config.train.eval_epochs = epochs, 10.0  # A.3: 100 to 800


def cross_validation(k=32, folds=4):
    """Lists the fields of the runs that choose the hyper-parameters (section 5.1)."""
    return {
        "data.protocol": "kfold",
        "data.protocol.k": 2 * k,
        "data.protocol.folds": folds,
        "data.protocol.on_shortage": "use_fewer",
        "train.test": False,
    }
