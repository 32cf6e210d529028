"""Trains the runs of a config's block `runs`, and tabulates them."""

import sys

from jaxprompt import signals
from jaxprompt.cli.results import SEEDS, SweepRun, group_of, tell
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError, escape


def train_grid(config: RunConfig, workdir: str, command: str = "train") -> int:
    """Trains the runs as few programs, as a command does, and prints their table. -> exit code"""
    from jaxprompt.runs.grid import runner

    grid, outcome = runner.train_grid(config, workdir, command, stop_signal=signals.heard)
    if outcome is None:
        return 0
    # All failed for one reason, which is told once, as the command's own error.
    if not outcome.results and len(set(outcome.failed.values())) == 1:
        raise InputError(next(iter(outcome.failed.values())))
    for name, error in outcome.failed.items():
        print(escape(f"jaxprompt {command}: {name}: {error}"), file=sys.stderr)
    runs = []
    for run in grid:
        names = zip(run.changes, run.name.split(","), strict=False)
        row = [shown for field, shown in names if field not in SEEDS]
        group = group_of("", run.changes)
        runs.append(SweepRun(",".join(row) or "all", "", run.changes, run.folder, group))
    tell(runs, outcome.failed)
    return 0
