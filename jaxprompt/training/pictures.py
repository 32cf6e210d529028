"""Plots of runs: curves.png of one run, a chart of several. They need matplotlib, an extra."""

import importlib.util
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxprompt.errors import InputError, is_kind
from jaxprompt.files import open_atomic
from jaxprompt.training.log import read_metrics
from jaxprompt.training.run_folder import read_result
from jaxprompt.training.run_result import RunResult

CURVES = "curves.png"
# Okabe and Ito's palette, which colour-blind readers tell apart too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def has_matplotlib() -> bool:
    """Returns whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def read_curves(workdir: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Reads the curves of metrics.jsonl: by name, (step, value) of finite values."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in read_metrics(workdir):
        values = {"loss": record["loss"]} if "loss" in record else {}
        for name, value in list(record.get("dev", {}).items())[:1]:  # the one that selects
            values[f"dev {name}"] = value
        for name, value in values.items():
            if is_kind(value, float):
                curves.setdefault(name, []).append((record["step"], value))
    return curves


def draw_curves(workdir: str | Path, title: str = "", path: str | Path = "") -> Path:
    """Plots loss and dev score of a run. Returns `path`, by default WORKDIR/curves.png.

    The best step of a finished run is marked; its metric may be one where lower is better.
    """
    curves, result = read_curves(workdir), read_result(workdir)
    best = None if result is None else result.best_step
    figure = new_figure(6.4, 1.6 + 2.2 * len(curves))
    axes = figure.subplots(max(len(curves), 1), sharex=True, squeeze=False)[:, 0]
    for index, (axis, (name, points)) in enumerate(zip(axes, curves.items(), strict=False)):
        steps, values = zip(*points, strict=True)
        marker = "o" if len(points) < 30 else ""
        axis.plot(steps, values, marker=marker, markersize=4, color=COLOURS[index])
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
        if best is not None and name.startswith("dev") and best in steps:
            mark_best(axis, best, f"best {dict(points)[best]:.3f} at step {best}", 0.06)
    axes[-1].set_xlabel("step")
    if title:
        axes[0].set_title(title)
    return save_figure(figure, Path(path or Path(workdir) / CURVES))


def draw_chart(rows: Mapping[str, Sequence[RunResult]], path: str | Path) -> Path:
    """Plots the mean test score (dev without a test split) of each row, with error bars.

    Bars are the population standard deviation over the runs of a row; points are the runs.
    """
    from jaxprompt.scoring.metrics import mean_std  # imported here, because it imports numpy

    runs = [result for results in rows.values() for result in results]
    splits = ("test", "dev", "held_out")
    common = [name for name in splits if all(getattr(run, name) is not None for run in runs)]
    if not common:
        raise InputError("--plot: the runs have no score in common; give runs with the same metric")
    split = common[0]
    metric = next(iter(getattr(runs[0], split)))
    figure = new_figure(7.2, 1.4 + 0.42 * len(rows))
    axis = figure.subplots()
    for position, results in enumerate(rows.values()):
        values = [next(iter(getattr(result, split).values())) for result in results]
        mean, std = mean_std(values)
        axis.barh(
            position, mean, xerr=std if len(values) > 1 else None, color=COLOURS[5], capsize=3
        )
        axis.plot(values, [position] * len(values), "o", color=COLOURS[0], markersize=4, alpha=0.7)
        axis.annotate(f" {mean:.3f}", (mean + std, position), va="center")
    axis.set_yticks(range(len(rows)), list(rows))
    axis.invert_yaxis()
    axis.set_xlabel(f"{split} {metric}, mean and standard deviation over the runs")
    axis.margins(x=0.12)
    return save_figure(figure, Path(path))


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of matplotlib, which is imported only here; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def mark_best(axis: Any, step: int, text: str, height: float) -> None:
    """Marks the best step of a curve; `height` is that of the text, as a share of the axis."""
    axis.axvline(step, color="#999999", linestyle=":", linewidth=1)
    axis.annotate(text, (0.98, height), ha="right", xycoords="axes fraction")


def check_picture(path: Path) -> None:
    """Raises InputError if no picture can be saved at `path`, before what it shows is computed."""
    _write_figure(new_figure(1, 1), io.BytesIO(), path)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {path}; give a file in a folder that you can write to")


def save_figure(figure: Any, path: Path) -> Path:
    """Saves a figure. Raises InputError for an unknown format or a failed write."""
    with open_atomic(path) as file:
        _write_figure(figure, file, path)
    return path


def _write_figure(figure: Any, file: BinaryIO, path: Path) -> None:
    kind = path.suffix[1:] or "png"
    # Without the date, so that equal runs write equal bytes.
    metadata = {"Date": None} if kind == "svg" else None
    try:
        figure.savefig(file, dpi=150, format=kind, metadata=metadata)
    except ValueError as error:  # unknown format
        raise InputError(f"{path}: {error}; use the ending .png, .svg or .pdf") from error
