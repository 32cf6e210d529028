"""What the runs of a paper's cells gave, as a table and as the numbers of a figure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxprompt.cli.results import SweepRun
from jaxprompt.config.load import flatten_config
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.runs.grid.expand import SEEDS
from jaxprompt.training.run_folder import RESULT, read_result
from launch.papers.figures import Point
from launch.papers.table import Cell, Paper, Published, read_object


class Measured(NamedTuple):
    """A cell's results, in percent."""

    scores: tuple[float, ...]  # of each seed
    best: tuple[float, ...]  # of the seeds that the paper would report; () where of all
    runs: int  # that have a result, those of a cross-validation among them, of `total`
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


def list_folds(cell: Cell, runs: Sequence[SweepRun]) -> list[tuple[SweepRun, SweepRun]]:
    """Lists the runs of a cell's cross-validation, each with that of `runs` which it is a fold of.

    Their folders stand in one of their own, folds/, with a checkpoint of their own. They divide
    twice the examples of a run whose data.protocol.k is given on the command line. [] where the
    cell has none.
    """
    twice = lambda run: {
        x: 2 * int(run.changes[x]) for x in ("data.protocol.k",) if x in run.changes
    }
    return [
        (
            run._replace(
                changes=run.changes | cell.folds | twice(run) | {"data.protocol.fold": fold},
                workdir=run.workdir.parent / "folds" / f"{run.workdir.name},fold={fold}",
            ),
            run,
        )
        for run in runs
        for fold in range(cell.folds.get("data.protocol.folds", 0))
    ]


def chosen_by_folds(cell: Cell, runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Lists of each seed the run whose mean over the folds is best on dev.

    Where the cell has no cross-validation these are all `runs`. A seed whose folds have no result
    is missing.
    """
    from jaxprompt.runs.grid.expand import select

    if not cell.folds:
        return list(runs)
    found, tried = [], []
    for fold, run in list_folds(cell, runs):
        result = read_result(fold.workdir)
        if result is not None and result.dev is not None:
            found.append((fold.changes, result))
            tried.append(run)
    return list({tried[i].workdir: tried[i] for i in select(found)}.values())


def measure(cell: Cell, runs: Sequence[SweepRun], best: int = 0) -> Measured:
    """Reads what the runs of a cell gave; `best` seeds count where the paper reports so."""
    from jaxprompt.runs.grid.expand import select

    found, configs, folds = [], [], [fold for fold, _ in list_folds(cell, runs)]
    for run in chosen_by_folds(cell, runs):
        result = read_result(run.workdir)
        if result is not None and result.test is not None:
            found.append((run.changes, result))
            configs.append(flatten_config(read_object(run.workdir / "config.json")))
    chosen = [found[i][1] for i in select(found)]
    read = lambda result: 100 * result.test[cell.metric or next(iter(result.test))]
    # By the metric that chose their steps: cells of one row are of the same seeds.
    merit = lambda result: next(iter(result.dev.values()))
    few = sorted(chosen, key=merit, reverse=True)[:best] if len(chosen) > best > 0 else []
    scores, top = (tuple(map(read, own)) for own in (chosen, few))
    seeds = {tuple(run.changes.get(field) for field in SEEDS) for run in runs}
    done = len(found) + sum((fold.workdir / RESULT).exists() for fold in folds)
    total = len(folds) + len(seeds) if folds else len(runs)
    return Measured(scores, top, done if found else 0, total, tuple(configs))


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
            deviation = "" if beside.std is None else f" ± {round(beside.std, 2)}"
            text += f" [{round(beside.mean, 2)}{deviation}]"
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
        method, at = paper.point_of(cell)
        points.append(
            Point(
                cell.task, method, at, cell.metric or metric_of(cell.task),
                *mean_of(own.scores), own.scores, own.runs, own.total, " ".join(own.backbones),
            )
        )  # fmt: skip
    return points
