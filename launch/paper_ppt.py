"""The tables and figures of PPT (Gu et al. 2022): which runs every number stands for."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paper_figures import Point, draw_bars, draw_lines

from configs.parts import ppt
from configs.ppt import has_cell


class Cell(NamedTuple):
    """One number: a setting on a task, run with every seed and learning rate."""

    row: str
    task: str
    method: str  # of configs/parts/ppt.py
    backbone: str  # by the paper's name, a key of HUB
    changes: Mapping[str, Any] = {}  # config field -> value, besides seeds and learning rate


class Published(NamedTuple):
    """What the paper prints in a cell, in percent."""

    mean: float
    std: float
    backbone: str


class Table(NamedTuple):
    """A table or figure of the paper."""

    about: str
    cells: Callable[[Sequence[str]], Iterable[Cell]]
    tasks: Sequence[str]  # the paper's, which are run without --tasks
    known: Sequence[str]  # what --tasks may name
    stand_ins: tuple[str, ...] = ()  # rows whose stand-in has a row of its own: run where asked
    draw: Callable[[Sequence[Point]], Any] | None = None  # of a figure


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
# Figure 2 (a): epochs on all data, of the released scripts; 5 for tasks that have none.
EPOCHS = {"sst2": 1, "sst5": 5, "boolq": 5, "rte": 20, "cb": 30, "race_middle": 5, "race_high": 5}


def is_chinese(task: str) -> bool:
    """Tells whether a task is Chinese."""
    return task in CHINESE or task == "tnews"


def main_backbone(task: str) -> str:
    """Names the backbone that the paper tunes prompts of."""
    return "CPM-2" if is_chinese(task) else "T5-XXL"


def table1(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields hard prompts with the same label words, then label words with the same hard prompt."""
    for task in tasks:
        cell = lambda row, method, task=task, **more: Cell(row, task, method, "T5-XXL", more)
        yield cell("none good/bad", "pt")
        asked = lambda name: {"task.form": "cloze", "task.template": TEMPLATES[name]}
        for name in TEMPLATES:
            yield cell(f"{name} good/bad", "pt", **asked(name))
        for words in LABEL_WORDS:
            given = {"task.words": ",".join(reversed(words.split("/")))}
            yield cell(f"man1 {words}", "pt", **asked("man1") | given)
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
        own = [task for task in tasks if is_chinese(task) == (family == "mT5")]
        smaller = [f"{family}-{size}" for size in SIZES]
        for name in smaller if family == "mT5" else smaller[:-1]:  # T5-XXL is the row "full"
            yield from (Cell(f"full {name}", task, "full", name) for task in own)
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
            epochs = float(EPOCHS.get(task, 5))
            every = {
                "data.protocol": "fraction", "data.ratio": 0.9, "data.holdout": 0.1,
                "train.total_epochs": epochs, "train.eval_steps": 0,
                "train.eval_epochs": epochs / 10,
            }  # fmt: skip
            yield Cell(f"{method}, all examples", task, method, main_backbone(task), every)
            yield Cell(f"{method}, 32 examples", task, method, main_backbone(task))


def figure4(tasks: Sequence[str]) -> Iterable[Cell]:
    """Yields full tuning, prompt tuning and PPT with 32 to 256 examples."""
    for examples in EXAMPLES:
        for method in ("full", "pt", "ppt"):
            row, changes = f"{method}, {examples} examples", {"data.n": examples}
            yield from (Cell(row, task, method, main_backbone(task), changes) for task in tasks)


_ALL = tuple(ppt.TASKS)
_FEW = tuple(task for task in _ALL if len(ppt.TASKS[task].words) <= 5)  # `n` examples in all
TABLES = {
    "table1": Table("hard prompts and label words", table1, ("sst2",), ("sst2",)),
    "table2": Table("initialisation of soft tokens", table2, ("sst2", "boolq"), _ALL),
    "table4": Table("the methods on English tasks", table4, ENGLISH, _ALL),
    "table4_chinese": Table("the methods on Chinese tasks", table4, CHINESE, _ALL, ("full",)),
    "table5": Table("the methods with many classes", table5, TOPICS, _ALL),
    "figure2": Table(
        "prompt tuning beside full tuning, all examples and 32", figure2, ENGLISH, _ALL,
        draw=draw_bars,
    ),
    "figure4": Table(
        "32 to 256 examples", figure4, ("race_middle", "cb"), _FEW, draw=draw_lines
    ),
}  # fmt: skip


def read_published(table: str) -> dict[tuple[str, str], Published]:
    """Reads what the paper prints in a table, by row and task. Its figures have no numbers."""
    with open(Path(__file__).parent / "published/ppt.csv", newline="", encoding="utf-8") as file:
        return {
            (line["row"], line["task"]): Published(
                float(line["mean"]), float(line["std"]), line["backbone"]
            )
            for line in csv.DictReader(file)
            if line["table"] == table.removesuffix("_chinese")
        }
