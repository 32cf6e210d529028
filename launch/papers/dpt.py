"""The tables and figures of DPT (Yao et al. 2022): which runs every number stands for."""

from collections.abc import Iterable, Sequence
from typing import Any

from configs.dpt import tasks as dpt
from launch.papers.figures import draw_spread
from launch.papers.table import ROOT, Cell, Paper, Table

MODELS = {"bert": "BERT", "roberta": "RoBERTa", "electra": "ELECTRA"}  # by system
HUB = {
    f"{MODELS[system]}-{size}": folder.format(size)
    for system, folder in dpt.FOLDERS.items()
    for size in dpt.SIZES
}
ROWS = {"bert": "bert full", "roberta": "roberta full", "electra": "electra full"}
ROWS |= {"dpt": "electra dpt"}
SETTINGS = {"full": "all examples", "low": "10%"}
TEXTS = tuple(task for task, task_fields in dpt.TASKS.items() if task_fields.words)


def table1(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields base and large models, fine-tuned and with DPT, on all examples and on 10%."""
    for setting in SETTINGS:
        for size in dpt.SIZES:
            for system, name in ROWS.items():
                yield from _cells(f"{size} {name}", tasks, setting, system, size)


def table2(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields large models on answers of several spans, with two metrics."""
    for setting in SETTINGS:
        for system, name in ROWS.items():
            for metric in ("exact_match", "f1"):
                for cell in _cells(f"large {name}", tasks, setting, system, "large"):
                    yield cell._replace(metric=metric)


def table3(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields the ways to score a class, on 10% of the examples."""
    rows = {"electra": "electra full", "sigma": "dpt sigma", "dpt": "dpt 1-sigma"}
    for system, name in rows.items():
        yield from _cells(f"base {name}", tasks, "low", system, "base")


def spread(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields large models, fine-tuned and with DPT, whose scores are shown seed by seed."""
    for setting in SETTINGS:
        for system in ("electra", "dpt"):
            yield from _cells(f"large {ROWS[system]}", tasks, setting, system, "large")


def _cells(row: str, tasks: Sequence[str], setting: str, system: str, size: str) -> Iterable[Cell]:
    model = f"{MODELS.get(system, 'ELECTRA')}-{size}"
    for task in tasks:
        yield Cell(f"{row}, {SETTINGS[setting]}", task, f"{setting},{system},{size}", model)


_SHARE = ("data.protocol", "data.protocol.ratio")
TABLES = {
    "table1": Table("classes of texts", table1, TEXTS, TEXTS, named_by=_SHARE),
    "table2": Table(
        "answers of several spans", table2, ("quoref",), ("quoref",), named_by=_SHARE
    ),
    "table3": Table(
        "1 - sigmoid compared with sigmoid", table3, TEXTS, TEXTS, named_by=("head.score", *_SHARE)
    ),
    "figure2": Table(
        "the scores of ten seeds", spread, ("sst2", "sst5", "trec"), tuple(dpt.TASKS),
        draw=draw_spread, named_by=_SHARE,
    ),
    "figure3": Table(
        "the scores of ten seeds on AG News", spread, ("ag_news",), ("ag_news",), draw=draw_spread,
        named_by=_SHARE,
    ),
}  # fmt: skip


class Dpt(Paper):
    """Prompt tuning of discriminators: the paper's models, or any ELECTRA by --backbone."""

    NAME = "dpt"
    TITLE = "DPT (Yao et al. 2022)"
    TABLES = TABLES
    HUB = HUB
    SEEDS = dpt.SEEDS
    SEEDED = ("seed",)  # the released code takes the same 10% with every seed
    BEST = 3  # section 4, evaluation protocols

    def why_not(self, cell: Cell, args: Any) -> str:
        """Returns why a cell is not run: --backbone replaces only ELECTRA, not BERT or RoBERTa."""
        if args.backbone and not args.rows and not cell.backbone.startswith("ELECTRA"):
            return "it is for another backbone; select it by --rows to run it on --backbone"
        return ""

    def config_of(self, cell: Cell, args: Any) -> str:
        """Names the run of configs/dpt/tasks.py."""
        return f"{ROOT / 'configs/dpt/tasks.py'}:{cell.task},{cell.method}"

    def rates(self, cell: Cell, backbone: str) -> Sequence[float]:
        """Returns the one learning rate of appendix A."""
        return (dpt.RATE if dpt.TASKS[cell.task].words else dpt.SPANS_RATE,)

    def point_of(self, cell: Cell) -> tuple[str, str]:
        """Names a figure's number."""
        setting, system, _ = cell.method.split(",")
        return system, {"full": "all"}.get(setting, SETTINGS[setting])


PAPER = Dpt()
