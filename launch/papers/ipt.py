"""The tables and figures of IPT (Jiang et al. 2022): which runs every number stands for.

The text of the paper lacks the names of table 3's rows and eight cells of table 6; both are read
from the authors' pictures of these tables.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from configs import ipt
from configs.ipt import knowledge, prompt_length, utilization
from launch.papers.figures import draw_lines
from launch.papers.table import ROOT, Cell, Paper, Table

ROBERTA = "RoBERTa-large"
BASES = {"prompt": "Prompt Tuning", "prefix": "Prefix Tuning"}
STRATEGIES = {
    "random": "Random IPT", "pretrained": "Pretrained IPT", "cnn": "Encoder IPT (CNN)",
    "lstm": "Encoder IPT (RNN)", "mlp": "Encoder IPT (MLP)",
}  # fmt: skip


def table2(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields the baselines, then every strategy on prompt tuning and on prefix tuning."""
    rows = {
        "Prompt Tuning": "task,prompt", "PPT": "ppt,prompt", "Prefix Tuning": "task,prefix",
        "Fine-tuning": "full,prompt",
    }  # fmt: skip
    for place, base in BASES.items():
        rows |= {f"{base} + {name}": f"{system},{place}" for system, name in STRATEGIES.items()}
    for row, method in rows.items():
        for task in tasks:
            yield _cell(row, task, f"end_to_end,{method}")


def table3(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields fine-tuning, prefix tuning and every strategy on it, 32 examples per class."""
    rows = {"Fine-tuning": "full", "Prefix Tuning": "task"}
    rows |= {f"Prefix Tuning + {name}": system for system, name in STRATEGIES.items()}
    for row, system in rows.items():
        for task in tasks:
            cell = _cell(row, task, f"few_shot,{system},prefix")
            yield cell._replace(folds=ipt.cross_validation())


def table5(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields random rows, these beside the topic's name, and rows that were trained on topics."""
    rows = ("Random IPT", "Random IPT + hard prompts", "Pretrained IPT")
    for row, method in zip(rows, knowledge.ROWS, strict=True):
        yield from (_cell(row, task, f"knowledge,{method}") for task in tasks)


def table6(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields the encoders with shares of the text."""
    for system in ("lstm", "cnn", "mlp"):  # the table's order
        for percent in utilization.PERCENTS:
            row = f"{STRATEGIES[system]}, {percent}%"
            for task in tasks:
                yield _cell(row, task, f"utilization,{system},prompt,{percent}")


def figure5(tasks: Sequence[str], place: str = "prompt") -> Iterable[Cell]:
    """Yields prompts of several lengths, of the task and of each text."""
    for system in prompt_length.SYSTEMS:
        name = " + Pretrained IPT" if system == "pretrained" else ""
        for length in prompt_length.LENGTHS:
            for task in tasks:
                row = f"{BASES[place]}{name}, length {length}"
                yield _cell(row, task, f"prompt_length,{system},{place},{length}")


def _cell(row: str, task: str, method: str) -> Cell:
    return Cell(row, task, method, ROBERTA, metric=ipt.TASKS[task].metric)


_ALL = tuple(ipt.TASKS)
_FEW = tuple(knowledge.TEMPLATES)
_LENGTH, _SHARE = (partial(draw_lines, axis=axis) for axis in ("length", "utilization"))
TABLES = {
    "table2": Table(
        "the strategies with all examples", table2, ipt.SUPERGLUE, _ALL,
        named_by=("prompt.on", "prompt.encoder"),
    ),
    "table3": Table(
        "prefix tuning with 32 examples per class", table3, ipt.SUPERGLUE, _ALL,
        named_by=(
            "data.protocol", "data.protocol.folds", "data.protocol.ratio", "prompt.on",
            "prompt.encoder",
        ),
    ),
    "table5": Table(
        "prefix tuning with knowledge of topics", table5, _FEW, _FEW, named_by=("task.template",)
    ),
    "table6": Table(
        "share of the text that encoders read", table6, ("boolq",), _ALL, draw=_SHARE,
        axis="utilization", named_by=("prompt.utilization",),
    ),
    "figure5": Table(
        "lengths of the prompt, on prompt tuning (a to d)", figure5, ipt.SUPERGLUE, _ALL,
        draw=_LENGTH, axis="length", named_by=("prompt.length",),
    ),
    "figure5_prefix": Table(
        "lengths of the prompt, on prefix tuning (e to h)", partial(figure5, place="prefix"),
        ipt.SUPERGLUE, _ALL, draw=_LENGTH, axis="length", named_by=("prompt.length",),
    ),
}  # fmt: skip


class Ipt(Paper):
    """Instance-wise prompts: RoBERTa-large, or any other encoder by --backbone."""

    NAME = "ipt"
    TITLE = "IPT (Jiang et al. 2022)"
    TABLES = TABLES
    HUB: Mapping[str, str] = {ROBERTA: "FacebookAI/roberta-large"}
    SEEDS = ipt.SEEDS
    FLAGS: Mapping[str, str] = {"prompt.pretrained": "--topics", "prompt.init": "--ppt"}

    def add_flags(self, parser: Any) -> None:
        """Adds --topics and --ppt."""
        parser.add_argument(
            "--topics", default="topics",
            help="folder of the exported topic classifiers cnn-prompt, lstm-prefix and so on",
        )  # fmt: skip
        parser.add_argument("--ppt", default="", help="export of a prompt that `pretrain` trained")

    def why_not(self, cell: Cell, args: Any) -> str:
        """Returns a message if the export that initialises the prompt of a cell is missing."""
        _, system, place, *_ = cell.method.split(",")
        if system == "ppt" and not args.ppt:
            return (
                "it needs a pre-trained prompt; pre-train one with configs/ppt/nsp.py:masked, "
                "`export` it, and name it by --ppt"
            )
        if system != "pretrained" and system not in ipt.ENCODERS:
            return ""
        export = Path(ipt.export_of(system, place, args.topics))
        if export.is_dir():
            return ""
        name = export.name.replace("-", ",")
        return (
            f"{export} does not exist; train configs/ipt/topics.py:{name} on texts with topics and "
            "`export` it there, or name another folder by --topics"
        )

    def config_of(self, cell: Cell, args: Any) -> str:
        """Names the run of a config in configs/ipt."""
        name, argument = cell.method.split(",", 1)
        return f"{ROOT}/configs/ipt/{name}.py:{cell.task},{argument}"

    def changes_of(
        self, cell: Cell, args: Any, overrides: Mapping[str, Any], backbone: str
    ) -> dict[str, Any]:
        """Lists the changes; fields of prompts do not apply to fine-tuning."""
        _, system, place, *_ = cell.method.split(",")
        if system == "full":
            overrides = {x: overrides[x] for x in overrides if not x.startswith("prompt.")}
        changes = super().changes_of(cell, args, overrides, backbone)
        if system == "ppt":
            changes["prompt.init"] = args.ppt
        elif system == "pretrained" or system in ipt.ENCODERS:
            changes["prompt.pretrained"] = ipt.export_of(system, place, args.topics)
        return changes

    def rates(self, cell: Cell, backbone: str) -> Sequence[float]:
        """Lists the learning rates that are searched; the paper names none of its own."""
        return ipt.FULL_RATES if cell.method.split(",")[1] == "full" else ipt.RATES

    def point_of(self, cell: Cell) -> tuple[str, str]:
        """Names a figure's number by its system, and by its length or percentage."""
        _, system, *_, at = cell.method.split(",")
        return system, at


PAPER = Ipt()
