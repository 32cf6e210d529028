"""What the runs of a paper's cells gave, as a table and as the numbers of a figure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxprompt.cli.results import SweepRun
from jaxprompt.config.block import flatten_config
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
    """Returns the mean and deviation of a cell; NaN if it has no results."""
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
    from jaxprompt.runs.grid.expand import select_best_runs

    if not cell.folds:
        return list(runs)
    results, candidates = [], []
    for fold, run in list_folds(cell, runs):
        result = read_result(fold.workdir)
        if result is not None and result.dev is not None:
            results.append((fold.changes, result))
            candidates.append(run)
    return list({candidates[i].workdir: candidates[i] for i in select_best_runs(results)}.values())


def measure(cell: Cell, runs: Sequence[SweepRun], best: int = 0) -> Measured:
    """Reads what the runs of a cell gave; `best` seeds count where the paper reports so."""
    from jaxprompt.runs.grid.expand import select_best_runs

    results, configs, folds = [], [], [fold for fold, _ in list_folds(cell, runs)]
    for run in chosen_by_folds(cell, runs):
        result = read_result(run.workdir)
        if result is not None and result.test is not None:
            results.append((run.changes, result))
            configs.append(flatten_config(read_object(run.workdir / "config.json")))
    selected = [results[i][1] for i in select_best_runs(results)]
    test_score = lambda result: 100 * result.test[cell.metric or next(iter(result.test))]
    # By the metric that chose their steps: cells of one row are of the same seeds.
    dev_score = lambda result: next(iter(result.dev.values()))
    best_results = (
        sorted(selected, key=dev_score, reverse=True)[:best] if len(selected) > best > 0 else []
    )
    scores, best_scores = (tuple(map(test_score, subset)) for subset in (selected, best_results))
    seeds = {tuple(run.changes.get(field) for field in SEEDS) for run in runs}
    num_finished = len(results) + sum((fold.workdir / RESULT).exists() for fold in folds)
    total = len(folds) + len(seeds) if folds else len(runs)
    return Measured(scores, best_scores, num_finished if results else 0, total, tuple(configs))


def show(
    measured: Sequence[tuple[Cell, Measured]],
    published: Mapping[tuple[str, str, str], Published],
) -> str:
    """Tabulates cells as Markdown, rows by tasks: measured, and published in brackets."""
    cells = {}
    format_scores = lambda scores: "{:.1f} ± {:.1f}".format(*mean_of(scores))
    for cell, cell_scores in measured:
        text = format_scores(cell_scores.scores) if cell_scores.runs else "-"
        if cell_scores.best:
            text = f"{format_scores(cell_scores.best)}, all {text}"
        if 0 < cell_scores.runs < cell_scores.total:
            text += f" ({cell_scores.runs} of {cell_scores.total} runs)"
        paper_scores = published.get((cell.row, cell.task, cell.metric))
        if paper_scores:
            deviation = "" if paper_scores.std is None else f" ± {round(paper_scores.std, 2)}"
            text += f" [{round(paper_scores.mean, 2)}{deviation}]"
        cells[cell.row, cell.column] = text
    rows, tasks = (list(dict.fromkeys(key[i] for key in cells)) for i in range(2))
    lines = ["| | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    for row in rows:
        lines.append(f"| {row} | " + " | ".join(cells.get((row, t), "") for t in tasks) + " |")
    return "\n".join(lines)


def metric_of(task: str) -> str:
    """Names the metric of a task."""
    return get_task(task).metric.replace("macro_f1", "macro-F1")


def list_points(paper: Paper, measured: Sequence[tuple[Cell, Measured]]) -> list[Point]:
    """Makes the numbers of a figure."""
    points = []
    for cell, cell_scores in measured:
        method, position = paper.point_of(cell)
        points.append(
            Point(
                cell.task,
                method,
                position,
                cell.metric or metric_of(cell.task),
                *mean_of(cell_scores.scores),
                cell_scores.scores,
                cell_scores.runs,
                cell_scores.total,
                " ".join(cell_scores.backbones),
            )
        )
    return points
