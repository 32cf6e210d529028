"""The tables of DART (Zhang et al. 2022): which runs every number stands for."""

from collections.abc import Iterable, Sequence
from typing import Any

from paper_table import ROOT, Cell, Paper, Table

from configs import dart
from jaxprompt.errors import choose

HUB = {"RoBERTa-large": "FacebookAI/roberta-large"}
ROBERTA = "RoBERTa-large"
SINGLE = ("sst2", "mr", "cr", "subj", "trec")
TASKS = (*SINGLE, "mnli", "snli", "qnli", "mrpc", "qqp")
# Table 4. The paper gives the words of length 3 alone; the others are ours.
LENGTHS = {
    2: ("{sentence} [soft*2] [mask]", "It was"),
    3: ("{sentence} [soft*2] [mask][soft*1]", "It was."),
    5: ("{sentence} [soft*4] [mask][soft*1]", "It really was so."),
    10: ("{sentence} [soft*9] [mask][soft*1]", "To me and to all it really was so."),
}
PAIRS = ("great/terrible", "fantastic/awful", "amazing/horrible", "good/bad")  # table 6
# Table 5. The paper says neither how long it trains on all examples nor what it selects on.
EVERY = {
    "data.protocol": "fraction", "data.ratio": 0.9, "data.holdout": 0.1,
    "train.total_epochs": 5.0, "train.eval_steps": 0, "train.eval_epochs": 0.5,
}  # fmt: skip


def table1(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields fine-tuning and DART with 16 examples per class, then fine-tuning on all."""
    for task in tasks:
        yield Cell("full", task, "full", ROBERTA)
        yield Cell("dart", task, "dart", ROBERTA)
        yield Cell("full_data_full", task, "full", ROBERTA, EVERY)


def table4(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields DART with templates of several lengths, and fine-tuning."""
    for task in tasks:
        for length, (template, text) in LENGTHS.items():
            own = {"task.template": template, "prompt.text": text, "prompt.length": length}
            yield Cell(f"DART (length = {length})", task, "dart", ROBERTA, own)
        yield Cell("Fine-tuning", task, "full", ROBERTA)


def table5(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields fine-tuning and DART on all examples."""
    for method in ("full", "dart"):
        yield from (Cell(method, task, method, ROBERTA, EVERY) for task in tasks)


def table6(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields DART, then DART with label words that stay words."""
    for task in tasks:
        yield Cell("differentiable token (DART)", task, "dart", ROBERTA)
        for pair in PAIRS:  # "great/terrible" is positive/negative; a config has the classes' order
            words = ",".join(reversed(pair.split("/")))
            yield Cell(pair, task, "fixed_labels", ROBERTA, {"task.words": words})


TABLES = {
    "table1": Table("the methods with 16 examples per class", table1, TASKS, TASKS),
    "table4": Table("templates of several lengths", table4, ("sst2",), ("sst2",)),
    "table5": Table("the methods with all examples", table5, TASKS, TASKS),
    "table6": Table("label words that stay words", table6, ("cr",), ("cr", "mr")),
}


class Dart(Paper):
    """Differentiable prompts: RoBERTa, or any masked language model by --backbone."""

    NAME = "dart"
    TITLE = "DART (Zhang et al. 2022)"
    TABLES = TABLES
    HUB = HUB
    SEEDS = dart.SEEDS

    def config_of(self, cell: Cell, args: Any) -> str:
        """Names the run of configs/dart.py."""
        more = "" if cell.method == "dart" else f",{cell.method}"
        return f"{ROOT / 'configs/dart.py'}:{choose('the task', cell.task, dart.TASKS)}{more}"

    def rates(self, cell: Cell, backbone: str) -> Sequence[float]:
        """Lists the learning rates of the paper's grid, or of fine-tuning in LM-BFF."""
        return dart.FULL_RATES if cell.method == "full" else dart.RATES


PAPER = Dart()
