"""What the runs of a paper's cells gave, as a table and as the numbers of a figure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paper_figures import Point
from paper_table import Cell, Paper, Published, read_object

from jaxprompt.assembly.load_config import fields
from jaxprompt.cli.sweep import SweepRun
from jaxprompt.data.tasks import get_task
from jaxprompt.training.run_folder import read_result


class Measured(NamedTuple):
    """A cell's results, in percent."""

    scores: tuple[float, ...]  # of each seed
    best: tuple[float, ...]  # of the seeds that the paper would report; () where of all
    runs: int  # that have a result, of `total`
    total: int
    configs: tuple[dict[str, Any], ...]  # of these runs, field -> value

    @property
    def backbones(self) -> tuple[str, ...]:
        """Where the backbones of the runs are."""
        return tuple(
            dict.fromkeys(
                config.get("backbone.path", "an unknown backbone") for config in self.configs
            )
        )


def mean_of(scores: Sequence[float]) -> tuple[float, float]:
    """Gives the mean of a cell and its deviation; NaN where nothing has a result."""
    from jaxprompt.scoring.metrics import mean_std

    return mean_std(list(scores)) if scores else (math.nan, math.nan)


def measure(cell: Cell, runs: Sequence[SweepRun], best: int = 0) -> Measured:
    """Reads what the runs of a cell gave; `best` seeds count where the paper reports so."""
    from jaxprompt.sweeps.runner import select

    found, configs = [], []
    for run in runs:
        result = read_result(run.workdir)
        if result and "test" in result:
            found.append((run.changes, result))
            configs.append(fields(read_object(run.workdir / "config.json")))
    chosen = select(found)
    read = lambda result: 100 * result["test"][cell.metric or next(iter(result["test"]))]
    merit = lambda result: result["dev"][cell.metric or next(iter(result["dev"]))]
    few = sorted(chosen, key=merit, reverse=True)[:best] if len(chosen) > best > 0 else []
    scores, top = (tuple(map(read, own)) for own in (chosen, few))
    return Measured(scores, top, len(found), len(runs), tuple(configs))


def show(
    measured: Sequence[tuple[Cell, Measured]],
    published: Mapping[tuple[str, str, str], Published],
) -> str:
    """Tabulates cells as Markdown, rows by tasks: measured, and published in brackets."""
    shown = {}
    write = lambda scores: "{:.1f} ± {:.1f}".format(*mean_of(scores))
    for cell, own in measured:
        text = write(own.scores) if own.runs else "-"
        if own.best:
            text = f"{write(own.best)}, all {text}"
        if 0 < own.runs < own.total:
            text += f" ({own.runs} of {own.total} runs)"
        beside = published.get((cell.row, cell.task, cell.metric))
        if beside:
            deviation = "" if beside.std is None else f" ± {beside.std:.1f}"
            text += f" [{beside.mean:.1f}{deviation}]"
        shown[cell.row, cell.column] = text
    rows, tasks = (list(dict.fromkeys(key[i] for key in shown)) for i in range(2))
    lines = ["| | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    for row in rows:
        lines.append(f"| {row} | " + " | ".join(shown.get((row, t), "") for t in tasks) + " |")
    return "\n".join(lines)


def metric_of(task: str) -> str:
    """Names the metric of a task."""
    return get_task(task).metric.replace("macro_f1", "macro-F1")


def list_points(paper: Paper, measured: Sequence[tuple[Cell, Measured]]) -> list[Point]:
    """Makes the numbers of a figure."""
    points = []
    for cell, own in measured:
        method, examples = paper.point_of(cell)
        points.append(
            Point(
                cell.task, method, examples, cell.metric or metric_of(cell.task),
                *mean_of(own.scores), own.scores, own.runs, own.total, " ".join(own.backbones),
            )
        )  # fmt: skip
    return points
