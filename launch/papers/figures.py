"""Draws the figures of a paper from measured numbers, and writes the numbers as CSV."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jaxprompt.errors import InputError, check_extra
from jaxprompt.files import write_atomic

SUFFIXES = (".png", ".pdf", ".svg")
NAMES = {  # by method
    "full": "full tuning", "pt": "prompt tuning", "ppt": "PPT", "electra": "fine-tuning",
    "dpt": "DPT", "task": "one prompt per task", "pretrained": "Pretrained IPT", "cnn": "CNN",
    "lstm": "LSTM", "mlp": "MLP", "embedding": "no MLP", "ascending": "from the first layer up",
    "descending": "from the last layer down",
}  # fmt: skip
AXES = {  # what numbers stand over -> its label
    "examples": "training examples", "length": "prompt length",
    "depth": "layers with a prompt", "utilization": "share of the text that is read, %",
}  # fmt: skip


class Point(NamedTuple):
    """One number of a figure, in percent; NaN where it has not been run."""

    task: str
    method: str
    at: str  # on the axis: training examples, a number or "all", or what else AXES has
    metric: str
    mean: float
    std: float
    scores: tuple[float, ...]  # of each seed
    runs: int  # that have a result
    of_runs: int
    backbone: str  # where it was measured


def check_output(path: Path) -> None:
    """Raises InputError where no picture can be written, before anything is run for it."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"--output={path} must end with one of {', '.join(SUFFIXES)}")
    check_extra("plots", "matplotlib", "a figure")


def write(path: Path, figure: Any, points: Sequence[Point], axis: str = "examples") -> list[Path]:
    """Writes a figure, and its numbers beside it. -> the files"""
    numbers, picture = path.with_suffix(".csv"), io.BytesIO()
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(axis if name == "at" else name for name in Point._fields)
    for point in points:
        shown = ["" if math.isnan(x) else f"{x:.4f}" for x in (point.mean, point.std)]
        scores = " ".join(f"{x:.4f}" for x in point.scores)
        lines.writerow(point._replace(mean=shown[0], std=shown[1], scores=scores))
    figure.savefig(picture, format=path.suffix[1:], dpi=200)
    write_atomic(numbers, text.getvalue())
    write_atomic(path, picture.getvalue())
    return [path, numbers]


def draw_lines(points: Sequence[Point], axis: str = "examples") -> Any:
    """Draws a panel per task: scores of each method over what the axis counts, logarithmic."""
    figure, panels, tasks = _panels(points, "task")
    for panel, task in zip(panels, tasks, strict=True):
        group = [point for point in points if point.task == task]
        for method in dict.fromkeys(point.method for point in group):
            line = [point for point in group if point.method == method]
            panel.errorbar(
                [float(point.at) for point in line], [point.mean for point in line],
                yerr=[point.std for point in line], label=NAMES[method], marker="o", capsize=3,
            )  # fmt: skip
        panel.set(title=task, xlabel=AXES[axis], xscale="log")
        panel.set_ylabel(f"{group[0].metric}, %")
        ticks = sorted({point.at for point in group}, key=float)
        panel.set_xticks(list(map(float, ticks)), ticks, minor=False)
        panel.minorticks_off()
        panel.legend()
    return figure


def draw_bars(points: Sequence[Point]) -> Any:
    """Draws a panel per number of examples: scores of each method, task by task."""
    figure, panels, sizes = _panels(points, "at")
    methods = list(dict.fromkeys(point.method for point in points))
    for panel, size in zip(panels, sizes, strict=True):
        group = [point for point in points if point.at == size]
        tasks = list(dict.fromkeys(point.task for point in group))
        width = 0.8 / len(methods)
        for place, method in enumerate(methods):
            bars = [p for p in group if p.method == method and not math.isnan(p.mean)]
            if not bars:
                continue
            panel.bar(
                [tasks.index(p.task) + (place - (len(methods) - 1) / 2) * width for p in bars],
                [p.mean for p in bars], width, yerr=[p.std for p in bars], label=NAMES[method],
                color=f"C{place}", capsize=3,
            )  # fmt: skip
        names = [f"{task}\n{next(p.metric for p in group if p.task == task)}" for task in tasks]
        panel.set_xticks(range(len(tasks)), names, rotation=30)
        panel.set(
            title=f"{size} examples", ylabel="%", ylim=(0, 100), xlim=(-0.5, len(tasks) - 0.5)
        )
        if panel.patches:
            panel.legend()
    return figure


def draw_spread(points: Sequence[Point]) -> Any:
    """Draws a panel per task: the score of every seed, by method and number of examples."""
    figure, panels, tasks = _panels(points, "task")
    for panel, task in zip(panels, tasks, strict=True):
        group = [point for point in points if point.task == task]
        for place, point in enumerate(group):
            count = len(point.scores)
            beside = [place + 0.3 * ((n + 0.5) / count - 0.5) for n in range(count)]
            panel.plot(beside, sorted(point.scores), "o", color=f"C{place % 2}", alpha=0.7)
            if count:
                panel.hlines(median(point.scores), place - 0.3, place + 0.3, color="black")
        names = [f"{NAMES.get(p.method, p.method)}\n{p.at} examples" for p in group]
        panel.set_xticks(range(len(group)), names, fontsize="small")
        panel.set(title=task, ylabel=f"{group[0].metric}, %", xlim=(-0.5, len(group) - 0.5))
    return figure


def _panels(points: Sequence[Point], field: str) -> tuple[Any, list[Any], list[str]]:
    """Makes a panel for each value of a field. -> figure, panels, values"""
    from matplotlib.figure import Figure  # without pyplot no display is asked for

    values = list(dict.fromkeys(getattr(point, field) for point in points))
    figure = Figure(figsize=(5 * len(values), 4), layout="constrained")
    backbones = dict.fromkeys(point.backbone for point in points if point.backbone)
    figure.suptitle(f"measured on {', '.join(backbones)}", fontsize="small")
    return figure, list(figure.subplots(1, len(values), squeeze=False)[0]), values
