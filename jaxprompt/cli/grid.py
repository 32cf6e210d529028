"""Trains a grid, the runs of the config block `runs`, and prints a table of the results."""

import sys

from jaxprompt import signals
from jaxprompt.cli.results import SEEDS, SweepRun, group_of, print_table
from jaxprompt.config.run import RunConfig
from jaxprompt.errors import InputError, escape


def train_grid(config: RunConfig, workdir: str, command: str = "train") -> int:
    """Trains the runs with as few programs as possible, and prints their table.

    Returns:
      The exit code.
    """
    from jaxprompt.runs.grid import runner

    grid, outcome = runner.train_grid(config, workdir, command, stop_signal=signals.stop_requested)
    if outcome is None:
        return 0
    # If all failed for one reason, it is raised once, as the error of the command.
    if not outcome.results and len(set(outcome.failed.values())) == 1:
        raise InputError(next(iter(outcome.failed.values())))
    for name, error in outcome.failed.items():
        print(escape(f"jaxprompt {command}: {name}: {error}"), file=sys.stderr)
    runs = []
    for run in grid:
        parts = zip(run.changes, run.name.split(","), strict=False)
        row = [part for field, part in parts if field not in SEEDS]
        group = group_of("", run.changes)
        runs.append(SweepRun(",".join(row) or "all", "", run.changes, run.folder, group))
    print_table(runs, outcome.failed)
    return 0
