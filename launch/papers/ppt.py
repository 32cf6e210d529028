"""The tables and figures of PPT (Gu et al. 2022): which runs every number stands for."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.parts import ppt
from configs.ppt import dtype_of, has_cell, learning_rates
from jaxprompt.cli.results import SweepRun
from jaxprompt.errors import InputError, check_known
from launch.papers.figures import draw_bars, draw_lines
from launch.papers.table import ROOT, Cell, Paper, Table

SIZES = ("Small", "Base", "Large", "XL", "XXL")
ADAPTED = "T5-XXL after 10K steps of LM adaptation"
# The paper's name -> where it is. The paper has T5 1.1 (its code says so). CPM-2 is in no format
# that is read here: mT5-XXL, the paper's other Chinese model of 11B, stands in for it. Of adapted
# models the one that is public has 100K steps (Lester et al. 2021).
HUB = {f"T5-{size}": f"google/t5-v1_1-{size.lower()}" for size in SIZES}
HUB |= {f"mT5-{size}": f"google/mt5-{size.lower()}" for size in SIZES}
HUB |= {"CPM-2": "google/mt5-xxl", ADAPTED: "google/t5-xxl-lm-adapt"}
STAND_INS = ("CPM-2", ADAPTED)  # what HUB has for these is not the paper's

ENGLISH = ("sst2", "sst5", "race_middle", "race_high", "boolq", "rte", "cb")
CHINESE = ("chnsenticorp", "amazon", "ccpm", "c3", "lcqmc", "cmnli", "ocnli")
TOPICS = ("tnews", "yahoo_answers_topics")
PROMPTED = ("pt", "hybrid_pt", "lm_adapt", "ppt", "hybrid_ppt", "unified_ppt")

# Table 1. "good/bad" is positive/negative; the words of a config are in the order of the classes.
TEMPLATES = {
    "man1": "{sentence}. It was [mask].",
    "man2": "Just [mask]! {sentence}",
    "man3": "{sentence}. All in all, it was [mask].",
    "gen1": ". {sentence}. a [mask].",
    "gen2": "{sentence}. A [mask] one.",
}
LABEL_WORDS = ("great/terrible", "dog/cat", "bad/good")
STARTS = ("normal", "labels", "vocab", "frequent", "task")  # table 2, as prompt.start has them
EXAMPLES = (32, 64, 128, 256)  # figure 4
# Figure 2 (a): epochs and examples per step with all data, of the released scripts/TASK/full on 8
# GPUs, 4 for a copy of the model: twice their BATCH_SIZE, times GRAD_ACC. OTHERS is ours, since
# nothing is released of Chinese tasks.
EVERY = {
    "full": {
        "sst2": (1, 16), "sst5": (5, 16), "boolq": (5, 16), "rte": (10, 8), "cb": (20, 16),
        "race_middle": (5, 16), "race_high": (2, 16),
    },
    "pt": {
        "sst2": (1, 32), "sst5": (5, 32), "boolq": (5, 16), "rte": (20, 16), "cb": (30, 32),
        "race_middle": (5, 32), "race_high": (5, 32),
    },
}  # fmt: skip
OTHERS = {"full": (5, 16), "pt": (5, 32)}


def is_chinese(task: str) -> bool:
    """Returns whether a task is Chinese."""
    return task in CHINESE or task == "tnews"


def main_backbone(task: str) -> str:
    """Names the backbone that the paper tunes prompts of."""
    return "CPM-2" if is_chinese(task) else "T5-XXL"


def table1(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields hard prompts with the same label words, then label words with the same hard prompt."""
    for task in tasks:
        cell = lambda row, method, task=task, **more: Cell(row, task, method, "T5-XXL", more)
        yield cell("none good/bad", "pt")
        fields = lambda name: {"task.form": "cloze", "task.template": TEMPLATES[name]}
        for name in TEMPLATES:
            yield cell(f"{name} good/bad", "pt", **fields(name))
        for words in LABEL_WORDS:
            label_words = {"task.words": ",".join(reversed(words.split("/")))}
            yield cell(f"man1 {words}", "pt", **fields("man1") | label_words)
        yield cell("full good/bad", "full")


def table2(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields the ways in which soft tokens are initialised."""
    for start in STARTS:
        changes = {"prompt.start": start}
        yield from (Cell(start, task, "pt", main_backbone(task), changes) for task in tasks)
    yield from (Cell("full", task, "full", main_backbone(task)) for task in tasks)


def table4(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields full tuning of every size, then the methods on the largest model."""
    for family in ("T5", "mT5"):
        family_tasks = [task for task in tasks if is_chinese(task) == (family == "mT5")]
        smaller = [f"{family}-{size}" for size in SIZES]
        for name in smaller if family == "mT5" else smaller[:-1]:  # T5-XXL is the row "full"
            yield from (Cell(f"full {name}", task, "full", name) for task in family_tasks)
    for method in ("full", *PROMPTED):
        for task in (task for task in tasks if has_cell(method, task)):
            adapted = method == "lm_adapt" and not is_chinese(task)
            yield Cell(method, task, method, ADAPTED if adapted else main_backbone(task))


def table5(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields the methods for many classes."""
    for method in ("full", "pt", "multiple_choice", "unified_ppt"):
        yield from (Cell(method, task, method, main_backbone(task)) for task in tasks)


def figure2(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields full tuning and prompt tuning, with all examples and with 32."""
    for method in ("full", "pt"):
        for task in tasks:
            epochs, batch = EVERY[method].get(task, OTHERS[method])
            every = {
                "data.protocol": "fraction", "data.protocol.ratio": 0.9,
                "data.protocol.holdout": 0.1, "data.batch": batch,
                "train.total_epochs": float(epochs), "train.eval_steps": 0,
                "train.eval_epochs": epochs / 10,
            }  # fmt: skip
            yield Cell(f"{method}, all examples", task, method, main_backbone(task), every)
            yield Cell(f"{method}, 32 examples", task, method, main_backbone(task))


def figure4(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields full tuning, prompt tuning and PPT with 32 to 256 examples."""
    for examples in EXAMPLES:
        for method in ("full", "pt", "ppt"):
            row, changes = f"{method}, {examples} examples", {"data.protocol.n": examples}
            yield from (Cell(row, task, method, main_backbone(task), changes) for task in tasks)


_CB = "cb has only 16 neutral examples, 8 each for train and dev, so its runs train on fewer"
_ALL = tuple(ppt.TASKS)
_FEW = tuple(task for task in _ALL if len(ppt.TASKS[task].words) <= 5)  # `n` examples in all
_EXAMPLES = ("data.protocol", "data.protocol.n", "data.protocol.ratio")
_ASKED = ("ppt.hard", "task.form")
TABLES = {
    "table1": Table(
        "hard prompts and label words", table1, ("sst2",), ("sst2",),
        named_by=("task.form", "task.template", "task.words"),
    ),
    "table2": Table(
        "initialisation of soft tokens", table2, ("sst2", "boolq"), _ALL,
        named_by=("prompt.start",),
    ),
    "table4": Table("the methods on English tasks", table4, ENGLISH, _ALL, named_by=_ASKED),
    "table4_chinese": Table(
        "the methods on Chinese tasks", table4, CHINESE, _ALL, ("full",), named_by=_ASKED
    ),
    "table5": Table(
        "the methods with many classes", table5, TOPICS, _ALL, named_by=_ASKED
    ),
    "figure2": Table(
        "prompt tuning and full tuning, all examples and 32", figure2, (*ENGLISH, *CHINESE),
        _ALL, draw=draw_bars, named_by=_EXAMPLES,
    ),
    "figure4": Table(
        "32 to 256 examples", figure4, ("race_middle", "cb"), _FEW, draw=draw_lines,
        named_by=_EXAMPLES,
    ),
}  # fmt: skip


class Ppt(Paper):
    """Pre-trained prompt tuning: T5 and mT5, and any other backbone by its kind."""

    NAME = "ppt"
    TITLE = "PPT (Gu et al. 2022)"
    TABLES = TABLES
    HUB = HUB
    STAND_INS = STAND_INS
    SEEDS = ppt.SEEDS
    FLAGS = {"prompt.init": "--prompts"}

    def add_flags(self, parser: Any) -> None:
        """Adds --kind, --adapted and --prompts."""
        parser.add_argument(
            "--kind", default="", help=f"kind of the backbone: {', '.join(ppt.ALL_KINDS)}"
        )
        parser.add_argument(
            "--adapted", default="", help="backbone after LM adaptation, for lm_adapt"
        )
        parser.add_argument(
            "--prompts", default="prompts",
            help="folder of the exported prompts nsp, nss, cls and unified; its subfolder zh has "
            "the Chinese ones",
        )  # fmt: skip

    def check(self, args: Any, saved: Mapping[str, Any]) -> None:
        """Fills in the kind. Raises InputError for one that does not go with the other flags."""
        if saved and args.kind and saved.get("kind") != args.kind:
            raise InputError(
                f"{args.workdir} contains runs with --kind={saved.get('kind')}, not "
                f"{args.kind}; use another --workdir"
            )
        args.kind = args.kind or saved.get("kind", "t5")
        check_known("--kind", args.kind, ppt.ALL_KINDS)
        if args.kind != "t5" and not (args.backbone or args.print):
            raise InputError(f"--kind={args.kind} needs --backbone, because the paper uses t5")
        if args.table == "table2" and ppt.ALL_KINDS[args.kind][1]:
            raise InputError(
                f"--kind={args.kind} has no soft tokens to initialise; use the kind without -deep"
            )

    def about(self, args: Any) -> dict[str, Any]:
        """Binds a workdir to the kind."""
        return {"kind": args.kind}

    def why_not(self, cell: Cell, args: Any) -> str:
        """Returns why a cell is not run: its backbone is not --backbone, or cannot be read."""
        adapted = args.adapted or (not args.backbone and cell.backbone == ADAPTED)
        if cell.method == "lm_adapt" and not adapted:
            return "give --adapted, the backbone that `adapt` wrote"
        if args.rows:
            return ""
        if args.backbone and cell.row == f"full {cell.backbone}":
            return "it is for another backbone; select it by --rows to run it on --backbone"
        if not args.backbone and cell.row in TABLES[args.table].stand_ins:
            return f"{cell.backbone} cannot be read; give --backbone"
        return ""

    def config_of(self, cell: Cell, args: Any) -> str:
        """Names the cell of configs/ppt/cells.py."""
        task = check_known("the task", cell.task, ppt.TASKS)
        return f"{ROOT / 'configs/ppt/cells.py'}:{task},{cell.method},{args.kind}"

    def changes_of(
        self, cell: Cell, args: Any, overrides: Mapping[str, Any], backbone: str
    ) -> dict[str, Any]:
        """Lists the changes; fields of prompts do not apply to full tuning."""
        if cell.method == "full":
            overrides = {x: overrides[x] for x in overrides if not x.startswith("prompt.")}
        if cell.method == "lm_adapt" and args.adapted:
            backbone = args.adapted
        changes = {"backbone.dtype": dtype_of(backbone)}
        changes |= super().changes_of(cell, args, overrides, backbone)
        if cell.method.endswith("ppt"):
            unified = cell.method.endswith("unified_ppt")
            changes["prompt.init"] = str(
                Path(args.prompts)
                / ("zh" if is_chinese(cell.task) else "")
                / ("unified" if unified else ppt.TASKS[cell.task].group)
            )
        return changes

    def rates(self, cell: Cell, backbone: str) -> Sequence[float]:
        """Lists the paper's learning rates."""
        return learning_rates(cell.method, backbone)

    def point_of(self, cell: Cell) -> tuple[str, str]:
        """Names a figure's number."""
        method, examples = super().point_of(cell)
        return method, examples or str(cell.changes.get("data.protocol.n", 32))

    def lacks(self, run: SweepRun, args: Any) -> str:
        """Returns which prompt is missing."""
        start = run.changes.get("prompt.init")
        if not start or Path(start).is_dir():
            return ""
        return (
            f"{start} does not exist; pre-train it by configs/ppt/{Path(start).name}.py and "
            "`export` it there, name another folder by --prompts, or select rows by --rows"
        )

    def remarks(self, args: Any) -> list[str]:
        """Returns the kind of the measured backbone, and which tasks have fewer examples."""
        lines = [_CB] if args.table == "figure4" else []
        if args.kind != "t5":
            lines.append(f"measured with a backbone of kind {args.kind}; the paper uses t5")
        return lines


PAPER = Ppt()
