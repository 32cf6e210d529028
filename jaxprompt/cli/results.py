"""Reads the runs in a folder and makes tables of their results."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxprompt import signals
from jaxprompt.cli import log, print_text
from jaxprompt.config.load import load_config
from jaxprompt.config.run import CHANGEABLE_FIELDS, KFold, RunConfig
from jaxprompt.errors import InputError
from jaxprompt.files import parse_json, read_bytes
from jaxprompt.inspection.tables import TableRun, format_table

# Runs that differ only in these share a row.
FOLD = "data.protocol.fold"
SEEDS = ("seed", "data.seed", FOLD, "data.only")
SEARCHED = ("optim.lr", "optim.weight_decay", "optim.lr_head", "optim.lr_backbone", "data.batch")
# Fields by which a row is named before all others.
_DISTINGUISHING = (
    "shared.tasks", "task.name", "prompt.name", "trainable", "head.name", "ppt.task",
    "backbone.path", "data.protocol.name",
)  # fmt: skip
_CONFIG, _RESULT = "config.json", "result.json"


class SweepRun(NamedTuple):
    """One run of several."""

    row: str  # its row of the table
    config: str  # what --config says
    changes: dict[str, Any]  # field -> value
    workdir: Path
    group: str = ""  # the name of the runs of which one is chosen on dev


def runs_below(folder: str | Path) -> list[Path]:
    """Lists the workdirs in a folder, directly or deeper."""
    workdirs = []
    # os.walk ignores folders that a run in progress deletes meanwhile.
    for path, folders, files in os.walk(folder):
        if _CONFIG in files and _is_run(_read_config(Path(path))):
            workdirs.append(Path(path))
            # In place, so that os.walk skips them: checkpoints have many files and no runs.
            folders[:] = [name for name in folders if name != "checkpoints"]
    return sorted(workdirs)


def check_single(workdir: str | Path) -> None:
    """Raises InputError, with their names, if a folder contains several runs instead of one."""
    if _is_run(_read_config(Path(workdir))):
        return
    runs = [str(path.relative_to(workdir)) for path in runs_below(workdir)]
    if runs:
        more = f", ... ({len(runs)} in all)" if len(runs) > 12 else ""
        shown = ", ".join(runs[:12]) + more
        raise InputError(
            f"{workdir} contains several runs: {shown}; choose one, e.g. "
            f"--workdir={Path(workdir) / runs[0]}"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    """Reads the config of a folder; {} if there is no readable one."""
    try:
        config = parse_json(read_bytes(folder / _CONFIG))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _is_run(config: Mapping[str, Any]) -> bool:
    """Returns whether a config is that of one run, not of a grid or a model."""
    runs = config.get("runs", {})
    grid = isinstance(runs, dict) and any(isinstance(x, list) and x for x in runs.values())
    return {"prompt", "optim"} <= set(config) and not grid


# -- a folder of runs -----------------------------------------------------------------------------


def read_folder(folder: str) -> list[SweepRun]:
    """Reads the finished runs of a folder and names their rows by the fields that differ.

    Runs that differ only in seeds share a row; of runs with equal configs and seeds one is counted.
    Learning rate, weight decay and batch size are part of the name if they were searched. Runs of
    `adapt` are left out: they have no method.

    Raises:
      InputError: if there is no finished run.
    """
    from jaxprompt.build.notes import effective_fields
    from jaxprompt.training.run_folder import read_result

    results = ((path, read_result(path)) for path in runs_below(folder))
    workdirs = [
        path for path, result in results if result is not None and result.method is not None
    ]
    if not workdirs:
        raise InputError(
            f"{folder} contains no finished run (no {_RESULT}); give a folder of workdirs"
        )
    leaves: list[Mapping[str, Any]]
    leaves = [effective_fields(load_config(str(path / _CONFIG))) for path in workdirs]
    # The path of the backbone may change within a workdir, but distinguishes runs in a table.
    free = tuple(name for name in CHANGEABLE_FIELDS if name != "backbone.path")
    fields = dict.fromkeys(
        [*_DISTINGUISHING, *(name for fields_of_run in leaves for name in fields_of_run)]
    )
    names = [name for name in fields if not name.startswith((*free, "runs."))]
    workdirs, leaves = _without_repeated(workdirs, leaves, names)
    differing = [name for name in names if len({str(x.get(name)) for x in leaves}) > 1]
    candidates = [name for name in differing if name not in (*SEEDS, *SEARCHED)]
    distinguishing = _distinguishing_fields(candidates, leaves)
    searched = [name for name in differing if name in SEARCHED]
    groups = [_name(fields_of_run, distinguishing) for fields_of_run in leaves]
    runs = []
    for path, fields_of_run, group in zip(workdirs, leaves, groups, strict=True):
        # A field that was searched elsewhere only would lengthen the names of these rows.
        alike = [other for other, name in zip(leaves, groups, strict=True) if name == group]
        tried = [name for name in searched if len({other.get(name) for other in alike}) > 1]
        row = " ".join([group, *(f"{name}={fields_of_run.get(name)}" for name in tried)])
        # Other protocols do not read the field.
        is_kfold = fields_of_run.get("data.protocol.name") == "kfold"
        seeds = [name for name in SEEDS if name != FOLD or is_kfold]
        changes = {name: fields_of_run.get(name) for name in (*seeds, *tried)}
        runs.append(SweepRun(row, "", changes, path, group))
    return runs


def _without_repeated(
    workdirs: Sequence[Path], leaves: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[list[Path], list[Mapping[str, Any]]]:
    """Leaves out runs with the config and seed of an earlier one, and logs both.

    They are one result, not two: a mean and a deviation over them would not be over seeds.
    """
    first: dict[tuple[str, ...], tuple[Path, Mapping[str, Any]]] = {}
    for path, fields in zip(workdirs, leaves, strict=True):
        key = tuple(str(fields.get(name)) for name in names)
        counted, _ = first.setdefault(key, (path, fields))
        if counted != path:
            log(f"{path} has the same config and seed as {counted}; only the latter is counted")
    return [path for path, _ in first.values()], [fields for _, fields in first.values()]


def _distinguishing_fields(names: Sequence[str], leaves: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the first fields that distinguish as many runs as all fields do."""

    def count_kinds(chosen: Sequence[str]) -> int:
        return len({tuple(str(fields.get(name)) for name in chosen) for fields in leaves})

    chosen: list[str] = []
    for name in names:
        if count_kinds(chosen) == count_kinds(names):
            break
        if count_kinds([*chosen, name]) > count_kinds(chosen):
            chosen.append(name)
    return chosen


def _name(fields: Mapping[str, Any], distinguishing: Sequence[str]) -> str:
    """Names a run by its method, or what it trains instead of a prompt, and by more fields."""
    method, trainable = fields.get("prompt.name"), fields.get("trainable", ())
    parts = [str(method), *(trainable if method == "none" else ())]
    shown = ("prompt.name", "trainable") if method == "none" else ("prompt.name",)
    others = [name for name in distinguishing if name not in shown]
    values = [f"{name}={fields[name]}" for name in others if fields.get(name) not in (None, "", ())]
    return " ".join([*parts, *values])


# -- the table ------------------------------------------------------------------------------------


def print_table(
    runs: Sequence[SweepRun], failed: Mapping[str, str], plot: str = "", best: int = 0
) -> None:
    """Prints the table, and plots it to the file `plot`.

    Args:
      runs: the runs.
      failed: errors of failed runs, by name.
      plot: the file of the plot; "" = no plot.
      best: adds to each row with more runs one of the `best` runs that are best on dev.

    Raises:
      InputError: if runs failed.
    """
    from jaxprompt.training.pictures import draw_chart

    rows = collect(runs)
    if rows:
        rows |= best_on_dev(runs)
        rows = add_best(rows, best) if best else rows
        if plot:
            draw_chart(
                {row: [run.result for run in row_runs] for row, row_runs in rows.items()}, plot
            )
        print_text(format_table(rows))
    if failed:
        raise InputError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}")


def collect(runs: Sequence[SweepRun]) -> dict[str, list[TableRun]]:
    """Reads the finished runs, by row."""
    rows: dict[str, list[TableRun]] = {}
    for run, table_run in _read_finished(runs):
        rows.setdefault(run.row, []).append(table_run)
    return rows


def _read_finished(runs: Sequence[SweepRun]) -> list[tuple[SweepRun, TableRun]]:
    return [(run, read_run(run.workdir)) for run in runs if (run.workdir / _RESULT).exists()]


def read_run(workdir: Path) -> TableRun:
    """Reads the result of a finished run, and the config values that tables show."""
    from jaxprompt.training.run_folder import read_result

    result, config = read_result(workdir), load_config(str(workdir / _CONFIG))
    assert result is not None
    protocol = config.data.protocol
    fold = protocol.fold if isinstance(protocol, KFold) else None
    return TableRun(result, config.optim.lr, config.data.seed, fold, config.data.only)


def best_on_dev(runs: Sequence[SweepRun]) -> dict[str, list[TableRun]]:
    """Adds a row for runs that differ in searched fields: the best run on dev for each seed."""
    from jaxprompt.runs.grid.expand import select_best_runs

    by_group: dict[str, list[tuple[SweepRun, TableRun]]] = {}
    for run, table_run in _read_finished(runs):
        by_group.setdefault(run.group, []).append((run, table_run))
    rows = {}
    for group, tried in by_group.items():
        if len({run.row for run, _ in tried}) > 1:
            chosen = select_best_runs([(run.changes, table_run.result) for run, table_run in tried])
            rows[f"{group} best on dev".strip()] = [tried[i][1] for i in chosen]
    return rows


def add_best(rows: Mapping[str, list[TableRun]], best: int) -> dict[str, list[TableRun]]:
    """Adds after each row with more than `best` runs one of those that are best on dev."""
    from jaxprompt.scoring.metrics import selection_score

    with_best: dict[str, list[TableRun]] = {}
    for row, runs in rows.items():
        with_best[row] = runs
        if len(runs) > best and all(run.result.dev is not None for run in runs):

            def merit(run):
                return selection_score(run.result.dev)

            with_best[f"{row}, best {best} on dev"] = sorted(runs, key=merit, reverse=True)[:best]
    return with_best


def group_of(argument: str, changes: Mapping[str, Any]) -> str:
    """Names a group of runs that differ only in seeds and searched fields."""
    parts = [f"{f}={v}" for f, v in changes.items() if f not in (*SEEDS, *SEARCHED)]
    return " ".join([argument, *parts]).strip()


# -- a grid ---------------------------------------------------------------------------------------


def train_grid(config: RunConfig, workdir: str, command: str = "train") -> int:
    """Trains the runs of `config.runs` with as few programs as possible, and prints their table.

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
        log(f"jaxprompt {command}: {name}: {error}")
    runs = []
    for run in grid:
        parts = zip(run.changes, run.name.split(","), strict=False)
        row = [part for field, part in parts if field not in SEEDS]
        group = group_of("", run.changes)
        runs.append(SweepRun(",".join(row) or "all", "", run.changes, run.folder, group))
    print_table(runs, outcome.failed)
    return 0
