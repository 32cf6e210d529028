"""How many runs a paper's table takes, and of which sizes, without running any."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxprompt.cli import sweep
from jaxprompt.cli.results import SweepRun
from jaxprompt.config.run import Balanced, Fraction, KFold, KShot, Protocol
from launch.papers.results import list_folds
from launch.papers.table import Cell

# Searched, or of a row, they cost more.
SIZES = ("prompt.length", "prompt.layers", "data.max_len", "data.batch", "backbone.dtype")


def _examples(protocol: Protocol) -> str:
    """Returns how many training examples a protocol samples."""
    if isinstance(protocol, Fraction) and protocol.ratio + protocol.holdout < 1:
        return f"{protocol.ratio:.0%}"
    if isinstance(protocol, KShot):
        return f"{protocol.k} examples per class"
    if isinstance(protocol, KFold):
        folds = protocol.folds
        return f"{folds - 1} of {folds} folds of {protocol.k} examples per class"
    return f"{protocol.n} examples" if isinstance(protocol, Balanced) else "all examples"


def estimate(
    runs: Sequence[tuple[Cell, list[SweepRun]]], overrides: Sequence[tuple[str, str]]
) -> str:
    """Lists how many runs there are of each size, with the command that estimates a step of one.

    The last line is the number of all runs.
    """
    sizes: dict[tuple[str, str], list[SweepRun]] = {}
    trained = []
    for cell, cell_runs in runs:
        if cell.folds:  # every setting in every fold, then one of each seed
            trained.append([fold for fold, _ in list_folds(cell, cell_runs)])
            cell_runs = cell_runs[: len({run.changes["seed"] for run in cell_runs})]
        if cell.does == "train":  # runs of a cell differ in what is searched
            by_size: dict[tuple[Any, ...], list[SweepRun]] = {}
            for run in cell_runs:
                by_size.setdefault(tuple(map(run.changes.get, SIZES)), []).append(run)
            trained += by_size.values()
    counted: set[Path] = set()  # two metrics of a row have the same runs
    for same_size in trained:
        cell_runs = [run for run in same_size if run.workdir not in counted]
        if not cell_runs:
            continue
        counted |= {run.workdir for run in cell_runs}
        c = sweep.load_run_config(cell_runs[0], ())
        duration = f"{c.train.total_steps} steps" if c.train.total_steps else ""
        duration = duration or f"{c.train.total_epochs:g} epochs"
        description = f"{duration} of {_examples(c.data.protocol)}, {c.data.batch} per step"
        part = "a backbone" if c.trainable else "a prompt"
        length = f", {n} tokens" if (n := c.prompt.get("length")) else ""
        method = f"(prompt.name={c.prompt.name}{length}, inputs of {c.data.max_len})"
        sizes.setdefault(
            (f"{description}, that train {part} {method}", c.backbone.path), []
        ).extend(cell_runs)
    lines = []
    for (description, backbone), cell_runs in sizes.items():
        searched = {
            field: cell_runs[0].changes[field] for field in SIZES if field in cell_runs[0].changes
        }
        fields = dict(overrides) | searched | {"backbone.path": backbone}
        flags = [f"--config.{field}={value}" for field, value in fields.items()]
        words = ["python", "-m", "jaxprompt", "plan", f"--config={cell_runs[0].config}", *flags]
        lines.append(
            f"{len(cell_runs)} runs of {description}:\n  {shlex.join(words)} --devices=..."
        )
    total = sum(map(len, sizes.values()))
    return "\n".join([*lines, f"total: {total} runs"])
