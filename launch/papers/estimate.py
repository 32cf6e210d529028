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
    """Says how many training examples a protocol samples."""
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
    """Lists how many runs there are of each size, with the command that estimates a step of one."""
    sizes: dict[tuple[str, str], list[SweepRun]] = {}
    trained = []
    for cell, own in runs:
        if cell.folds:  # every setting in every fold, then one of each seed
            trained.append([fold for fold, _ in list_folds(cell, own)])
            own = own[: len({run.changes["seed"] for run in own})]
        if cell.does == "train":  # runs of a cell differ in what is searched
            sized: dict[tuple[Any, ...], list[SweepRun]] = {}
            for run in own:
                sized.setdefault(tuple(map(run.changes.get, SIZES)), []).append(run)
            trained += sized.values()
    counted: set[Path] = set()  # two metrics of a row have the same runs
    for some in trained:
        own = [run for run in some if run.workdir not in counted]
        if not own:
            continue
        counted |= {run.workdir for run in own}
        c = sweep.load_run_config(own[0], ())
        much = f"{c.train.total_steps} steps" if c.train.total_steps else ""
        much = much or f"{c.train.total_epochs:g} epochs"
        about = f"{much} of {_examples(c.data.protocol)}, {c.data.batch} a step"
        part = "a backbone" if c.trainable else "a prompt"
        length = f", {n} tokens" if (n := c.prompt.get("length")) else ""
        method = f"(prompt.name={c.prompt.name}{length}, inputs of {c.data.max_len})"
        sizes.setdefault((f"{about}, that train {part} {method}", c.backbone.path), []).extend(own)
    lines = []
    for (about, backbone), own in sizes.items():
        searched = {field: own[0].changes[field] for field in SIZES if field in own[0].changes}
        given = dict(overrides) | searched | {"backbone.path": backbone}
        flags = [f"--config.{field}={value}" for field, value in given.items()]
        words = ["python", "-m", "jaxprompt", "plan", f"--config={own[0].config}", *flags]
        lines.append(f"{len(own)} runs of {about}:\n  {shlex.join(words)} --devices=...")
    return "\n".join(lines)
