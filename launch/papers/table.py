"""What the reproduction of every paper shares: cells, tables, and what a paper says of its own."""

import abc
import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from jaxprompt.cli.results import SweepRun
from jaxprompt.errors import InputError
from launch.papers.figures import Point

ROOT = Path(__file__).resolve().parents[2]


class Cell(NamedTuple):
    """One number: a setting on a task, run with every seed and learning rate."""

    row: str
    task: str
    method: str  # of the paper's configs
    backbone: str  # by the paper's name, a key of Paper.HUB
    changes: Mapping[str, Any] = {}  # config field -> value, besides seeds and learning rate
    metric: str = ""  # of those that the task has; "" = its first
    # What the runs of a cross-validation have of their own, which choose what is searched; {} = dev
    # chooses.
    folds: Mapping[str, Any] = {}
    does: str = "train"  # | evaluate, of what trains nothing | majority
    once: bool = False  # no seed changes it

    @property
    def column(self) -> str:
        """Names the column of its table."""
        return f"{self.task} {self.metric}".strip()


class Published(NamedTuple):
    """What the paper prints in a cell, in percent."""

    mean: float
    std: float | None  # None where it prints a mean alone
    backbone: str


class Table(NamedTuple):
    """A table or figure of the paper."""

    about: str
    cells: Callable[[Sequence[str]], Iterable[Cell]]
    tasks: Sequence[str]  # the paper's, which are run without --tasks
    choices: Sequence[str]  # what --tasks may name
    stand_ins: tuple[str, ...] = ()  # rows whose stand-in has a row of its own: run where asked
    draw: Callable[[Sequence[Point]], Any] | None = None  # of a figure, or of a table's curves
    axis: str = "examples"  # what a picture has its numbers over, of paper_figures.AXES
    named_by: tuple[str, ...] = ()  # config fields that a row is named by


class Paper(abc.ABC):
    """A paper: its tables, and the runs that a cell of them stands for."""

    NAME: ClassVar[str]  # on the command line, and of the file of what it prints
    TITLE: ClassVar[str]
    TABLES: ClassVar[Mapping[str, Table]]
    HUB: ClassVar[Mapping[str, str]]  # the paper's name of a backbone -> where it is
    STAND_INS: ClassVar[tuple[str, ...]] = ()  # of these, what HUB has is not the paper's
    SEEDS: ClassVar[tuple[int, ...]]
    SEEDED: ClassVar[tuple[str, ...]] = ("seed", "data.seed")  # the fields that a seed is of
    BEST: ClassVar[int] = 0  # it reports the mean of that many seeds; 0 = of all
    # Flags of its own beside --backbone, --seeds and --learning-rates, by the field they set.
    FLAGS: ClassVar[Mapping[str, str]] = {}

    def add_flags(self, parser: Any) -> None:
        """Adds the paper's own flags."""
        del parser

    def check(self, args: Any, saved: Mapping[str, Any]) -> None:
        """Checks and completes its own flags; `saved` is the table.json of the workdir."""
        del args, saved

    def about(self, args: Any) -> dict[str, Any]:
        """Returns the settings that a workdir is for, in addition to the table."""
        return {}

    def why_not(self, cell: Cell, args: Any) -> str:
        """Returns why a cell is not run and what to do; "" if it is run."""
        return ""

    def seeds_of(self, cell: Cell) -> Sequence[int]:
        """Lists the seeds of a cell."""
        del cell
        return self.SEEDS

    @abc.abstractmethod
    def config_of(self, cell: Cell, args: Any) -> str:
        """Names the config of a cell, PATH:ARGUMENT."""

    def changes_of(
        self, cell: Cell, args: Any, overrides: Mapping[str, Any], backbone: str
    ) -> dict[str, Any]:
        """Lists the changes of the runs of a cell; `overrides` are from the command line."""
        return {**cell.changes, **overrides, "backbone.path": backbone}

    @abc.abstractmethod
    def rates(self, cell: Cell, backbone: str) -> Sequence[float]:
        """Lists the learning rates that are searched; () = the config's own."""

    def searched(self, cell: Cell) -> Mapping[str, Sequence[Any]]:
        """Lists the values that are searched of other fields."""
        del cell
        return {}

    def follows(self, cell: Cell, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Lists the fields that follow from those that are searched or set, `changes`."""
        del cell, changes
        return {}

    def point_of(self, cell: Cell) -> tuple[str, str]:
        """Names a figure's number. -> the method, its place on the figure's axis"""
        return cell.method, "all" if "data.protocol" in cell.changes else ""

    def lacks(self, run: SweepRun, args: Any) -> str:
        """Returns what a run lacks besides data and what to do; "" if it can run."""
        return ""

    def remarks(self, args: Any) -> list[str]:
        """Returns which flags differ from the paper, for the heading of the measured values."""
        return []


def read_published(paper: str, table: str) -> dict[tuple[str, str, str], Published]:
    """Reads what a paper prints in a table, by row, task and metric.

    The metric is "" too, for the first of a row and a task. Figures have no numbers, and neither
    have cells that cannot be read in the paper.
    """
    path = Path(__file__).parent / f"published/{paper}.csv"
    cells: dict[tuple[str, str, str], Published] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line["table"] != table.removesuffix("_chinese") or not line["mean"]:
                continue
            std = float(line["std"]) if line["std"] else None
            published = Published(float(line["mean"]), std, line["backbone"])
            cells[line["row"], line["task"], line["metric"]] = published
            cells.setdefault((line["row"], line["task"], ""), published)
    return cells


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object, {} where there is none."""
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}); use another --workdir") from error
