"""The tables of DART (Zhang et al. 2022): which runs every number stands for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from configs.dart import few_shot, lm_bff, relations
from jaxprompt.errors import check_known
from launch.papers.table import ROOT, Cell, Paper, Table

ROBERTA, BERT, SCIBERT = "RoBERTa-large", "BERT-large-uncased", "SciBERT"
HUB = {
    ROBERTA: "FacebookAI/roberta-large",
    BERT: "google-bert/bert-large-uncased",
    SCIBERT: "allenai/scibert_scivocab_uncased",
}
SEMEVAL = "sem_eval_2010_task_8"
SINGLE = ("sst2", "mr", "cr", "subj", "trec")
TASKS = (*SINGLE, "mnli", "snli", "qnli", "mrpc", "qqp")
# Of configs/dart/lm_bff.py. The paper's numbers of fine-tuning are those of Gao et al. (2021) too:
# table 1, whose other rows say so in its caption, has them digit by digit, and table 5 names its
# source.
BESIDE = ("zero_shot", "in_context", "lm_bff", "full")
SEARCHED = ("lm_bff", "full")  # with LM-BFF's grid of batches
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
    "data.protocol": "fraction", "data.protocol.ratio": 0.9, "data.protocol.holdout": 0.1,
    "data.batch": 8, "train.total_epochs": 5.0, "train.total_steps": 0, "train.eval_steps": 0,
    "train.eval_epochs": 0.5,
}  # fmt: skip


def table1(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields what trains nothing, what trains on 16 examples per class, and fine-tuning on all."""
    for task in tasks:
        yield Cell("majority", task, "zero_shot", ROBERTA, does="majority", once=True)
        yield Cell("zero_shot", task, "zero_shot", ROBERTA, does="evaluate", once=True)
        yield Cell("in_context", task, "in_context", ROBERTA, does="evaluate")
        yield Cell("full", task, "full", ROBERTA)
        yield Cell("lm_bff", task, "lm_bff", ROBERTA)
        yield Cell("p_tuning", task, "p_tuning", ROBERTA)
        yield Cell("dart", task, "dart", ROBERTA)
        yield Cell("full_data_full", task, "full", ROBERTA, EVERY)


def table2(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields the methods on relations, with 8, 16, 32 and all examples per class."""
    for row, method in (("full", "fine_tuning"), ("lm_bff", "lm_bff"), ("dart", "dart")):
        yield from _relations(row, method, tasks)


def table3(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields fine-tuning, DART, and DART without one of its parts each."""
    for row, method in (("full", "fine_tuning"), ("dart", "dart")):
        yield from _relations(row, method, tasks)
    for method in ("no_fluency", "fixed_template", "fixed_labels"):
        yield from _relations(f"dart_{method}", method, tasks)


def _relations(row: str, method: str, tasks: Sequence[str]) -> Iterable[Cell]:
    for task in tasks:
        backbone = SCIBERT if task == "chemprot" else BERT
        metric = relations.TASKS[task].metric
        for shots in relations.SHOTS:
            examples = "all examples" if shots == "full" else f"K={shots}"
            yield Cell(f"{row}, {examples}", task, f"{shots},{method}", backbone, metric=metric)


def table4(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields DART with templates of several lengths, and fine-tuning."""
    for task in tasks:
        for length, (template, text) in LENGTHS.items():
            changes = {"task.template": template, "prompt.text": text, "prompt.length": length}
            yield Cell(f"DART (length = {length})", task, "dart", ROBERTA, changes)
        yield Cell("Fine-tuning", task, "full", ROBERTA)


def table5(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields the methods on all examples."""
    for method in ("full", "lm_bff", "dart"):
        yield from (Cell(method, task, method, ROBERTA, EVERY) for task in tasks)


def table6(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields DART, then DART with label words that stay words."""
    for task in tasks:
        yield Cell("differentiable token (DART)", task, "dart", ROBERTA)
        for pair in PAIRS:  # "great/terrible" is positive/negative; a config has the classes' order
            words = ",".join(reversed(pair.split("/")))
            yield Cell(pair, task, "fixed_labels", ROBERTA, {"task.words": words})


_SHOTS = ("data.protocol", "data.protocol.k", "data.protocol.ratio")
TABLES = {
    "table1": Table(
        "the methods with 16 examples per class", table1, TASKS, TASKS, named_by=_SHOTS
    ),
    "table2": Table(
        "relations between entities", table2, relations.TABLES, relations.TABLES,
        named_by=(*_SHOTS, "task.metric"),
    ),
    "table3": Table(
        "DART without its parts", table3, (SEMEVAL,), relations.TABLES,
        named_by=(*_SHOTS, "task.metric", "prompt.fluency", "prompt.labels", "trainable"),
    ),
    "table4": Table(
        "templates of several lengths", table4, ("sst2",), ("sst2",),
        named_by=("task.template", "prompt.text", "prompt.length"),
    ),
    "table5": Table(
        "the methods with all examples", table5, TASKS, TASKS,
        named_by=("data.protocol", "data.protocol.ratio"),
    ),
    "table6": Table(
        "label words that stay words", table6, ("cr",), ("cr", "mr"), named_by=("task.words",)
    ),
}  # fmt: skip


class Dart(Paper):
    """Differentiable prompts: the paper's models, or any masked language model by --backbone."""

    NAME = "dart"
    TITLE = "DART (Zhang et al. 2022)"
    TABLES = TABLES
    HUB = HUB
    SEEDS = few_shot.SEEDS

    def config_of(self, cell: Cell, args: Any) -> str:
        """Names the run of configs/dart/few_shot.py or configs/dart/relations.py."""
        if cell.task in relations.TASKS:
            return f"{ROOT / 'configs/dart/relations.py'}:{cell.task},{cell.method}"
        if cell.method in BESIDE:
            return f"{ROOT / 'configs/dart/lm_bff.py'}:{cell.task},{cell.method}"
        more = "" if cell.method == "dart" else f",{cell.method}"
        task = check_known("the task", cell.task, few_shot.TASKS)
        return f"{ROOT / 'configs/dart/few_shot.py'}:{task}{more}"

    def rates(self, cell: Cell, backbone: str) -> Sequence[float]:
        """Lists the learning rates of the paper's grids, or of LM-BFF's."""
        if cell.task in relations.TASKS:
            return relations.TASKS[cell.task].rates
        if cell.method in BESIDE:
            return lm_bff.RATES
        return few_shot.RATES

    def searched(self, cell: Cell) -> Mapping[str, Sequence[Any]]:
        """Lists the batches of LM-BFF's grid."""
        few = cell.method in SEARCHED and cell.task in few_shot.TASKS and not cell.changes
        return {"data.batch": lm_bff.BATCHES} if few else {}

    def remarks(self, args: Any) -> list[str]:
        """Returns the source of the rows of Gao et al., and the fields that are not searched."""
        lines = ["the paper also searches weight decay, epochs, batch size and accumulation"]
        if args.table in ("table1", "table2", "table5"):
            lines.append(
                "lm_bff uses manual prompts, with the words that initialise DART's embeddings, "
                "except on mrpc and qqp"
            )
        if args.table == "table1":
            lines.append("the published numbers of lm_bff are for prompts that T5 generated")
        if args.table in ("table1", "table4", "table5"):
            lines.append("fine-tuning uses the settings of LM-BFF, whose numbers the paper copies")
        return lines


PAPER = Dart()
