"""Reproduces a table or figure of a paper and prints it next to the published numbers.

usage: python launch/papers PAPER TABLE --workdir DIR [--backbone PATH] [--config.FIELD=VALUE ...]

{tables}

A cell is the mean ± population standard deviation on the test split over the seeds, in percent. For
each seed, the learning rate that is best on dev is used. If a paper uses cross-validation, the mean
over the folds selects the learning rate, and the cell has the score of one more run with it. If a
paper only reports its best seeds, the mean of the seeds that are best on dev comes first. The
published number follows in brackets; "-" has not been run. Runs that have a result are not run
again, and runs of equal shapes train as one program. The numbers of a figure are also written as a
CSV file.
"""

import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxprompt.build.check import check_config
from jaxprompt.cli import sweep
from jaxprompt.cli.evaluate import evaluate, majority
from jaxprompt.cli.options import Parser
from jaxprompt.cli.results import SweepRun
from jaxprompt.config.block import flatten_config
from jaxprompt.config.run import CHANGEABLE_FIELDS
from jaxprompt.errors import InputError, check_known, escape
from jaxprompt.files import make_folder, write_atomic
from jaxprompt.inspection.tables import list_failures
from jaxprompt.training.run_folder import (
    RESULT,
    bind_workdir,
    read_result,
    write_result,
)
from jaxprompt.training.run_result import RunResult
from launch.papers import figures
from launch.papers.dart import PAPER as DART
from launch.papers.dpt import PAPER as DPT
from launch.papers.estimate import estimate
from launch.papers.ipt import PAPER as IPT
from launch.papers.ppt import PAPER as PPT
from launch.papers.ptuning_v2 import PAPER as PTUNING_V2
from launch.papers.results import (
    Measured,
    chosen_by_folds,
    list_folds,
    list_points,
    measure,
    metric_of,
    show,
)
from launch.papers.table import Cell, Paper, Table, read_object, read_published

PAPERS: dict[str, Paper] = {paper.NAME: paper for paper in (PPT, DART, DPT, IPT, PTUNING_V2)}
FLAGS = {
    "backbone.path": "--backbone", "optim.lr": "--learning-rates", "seed": "--seeds",
    "data.seed": "--seeds", "data.source": "--data",
}  # fmt: skip
# What may differ from the paper's settings and change no number but by rounding.
PLACE = (
    *FLAGS, "prompt.init", "corpus.", "data.files.", "data.cache_dir",
    "data.multiple", "data.eval_batch", "mesh.", "cache.", "runs.", "backbone.stack",
    "backbone.remat", "backbone.attention", "train.log_steps", "train.save_steps", "train.tracker",
)  # fmt: skip


# -- arguments ------------------------------------------------------------------------------------


def make_parser(argv: Sequence[str]) -> Parser:
    """Returns the parser, with the flags of the paper that `argv` names, or of every paper."""
    tables = [
        f"{paper.TITLE}, PAPER = {paper.NAME}:\n"
        + "\n".join(f"  {name:15} {table.about}" for name, table in paper.TABLES.items())
        for paper in PAPERS.values()
    ]
    doc = (__doc__ or "").replace("{tables}", "\n\n".join(tables))
    parser = Parser("paper", doc, config=False)
    parser.prog = "python launch/papers"
    parser.takes_overrides = True
    parser.add_argument("paper", help=f"one of {', '.join(PAPERS)}")
    parser.add_argument("table", help="a table or figure of the list above")
    parser.add_argument(
        "--workdir", required=True, help="folder of the runs; each table needs a separate one"
    )
    parser.add_argument(
        "--backbone", default="", help="folder, hub id or pkg:PACKAGE/FOLDER (default: the "
        "paper's backbones)",
    )  # fmt: skip
    papers = [paper for name, paper in PAPERS.items() if name in argv] or list(PAPERS.values())
    for paper in papers:
        paper.add_flags(parser)
    parser.add_argument(
        "--data", default="", help="folder with a folder per task (default: the hub)"
    )
    parser.add_argument("--tasks", default="", help="only these tasks, separated by semicolons")
    parser.add_argument("--rows", default="", help="only these rows, separated by semicolons")
    parser.add_argument("--seeds", default="", help="seeds (default: the paper's)")
    parser.add_argument(
        "--learning-rates", default="", help="learning rates (default: the paper's)"
    )
    parser.add_argument(
        "--output",
        default="",
        help="file of the figure: .png, .pdf or .svg (default: in the workdir)",
    )
    do = parser.add_mutually_exclusive_group()
    do.add_argument(
        "--print", action="store_true", help="print the results so far, and run nothing"
    )
    do.add_argument(
        "--estimate", action="store_true",
        help="print the number of runs and the commands that estimate their cost, and run nothing",
    )  # fmt: skip
    return parser


def pick(table: Table, args: Any) -> list[Cell]:
    """Lists the selected cells. Raises InputError for an unknown row or task."""
    tasks = _listed("--tasks", args.tasks, table.choices) or table.tasks
    cells = list(table.cells(tasks))
    rows = _listed("--rows", args.rows, list(dict.fromkeys(cell.row for cell in cells)))
    return [cell for cell in cells if not rows or cell.row in rows]


def _listed(flag: str, text: str, choices: Sequence[str]) -> list[str]:
    parts = [part.strip() for part in text.split(";") if part.strip()]
    for part in parts:
        if part not in choices and set(map(str.strip, part.split(","))) <= set(choices):
            raise InputError(f"{flag}={part!r}: separate names by ; because some contain commas")
    return [check_known(flag, part, choices) for part in parts]


def log_left_out(cells: Sequence[Cell], args: Any) -> None:
    """Logs which rows are not run. Raises InputError if --rows selects one of them."""
    why_not = PAPERS[args.paper].why_not
    for row, reason in dict.fromkeys((cell.row, why_not(cell, args)) for cell in cells):
        if reason and args.rows:
            raise InputError(f"--rows={row}: {reason}")
        if reason:
            print(f"{row} is left out: {reason}", file=sys.stderr)


def bind(args: Any) -> None:
    """Checks the paper's own flags. Raises InputError where the workdir is of another table."""
    saved = read_object(Path(args.workdir) / "table.json")
    for name in ("paper", "table"):
        if saved and saved.get(name) != getattr(args, name):
            raise InputError(
                f"{args.workdir} contains runs of {name} {saved.get(name)}, not "
                f"{getattr(args, name)}; use another --workdir"
            )
    PAPERS[args.paper].check(args, saved)


def check_overrides(args: Any, overrides: Sequence[tuple[str, str]]) -> None:
    """Raises InputError for a field that a flag sets, or that differs between rows or runs."""
    paper = PAPERS[args.paper]
    flags, named_by = FLAGS | paper.FLAGS, paper.TABLES[args.table].named_by
    for field, _ in overrides:
        if field in flags:
            raise InputError(f"--config.{field} cannot be set here; use {flags[field]} instead")
        if field.removesuffix(".name") in named_by:  # of a block that is chosen by name
            raise InputError(
                f"--config.{field} distinguishes the rows of {args.table}; remove it, and select "
                "rows by --rows"
            )
        if field == "train.test":
            raise InputError("--config.train.test: every cell needs the test split; remove it")
        if field.startswith("runs.") and field != "runs.size":
            raise InputError(
                f"--config.{field} cannot be set here; use --seeds or --learning-rates instead"
            )


def picture_path(args: Any) -> Path:
    """Returns the path of the figure. Raises InputError for a path that cannot be written."""
    path = Path(args.output or Path(args.workdir) / f"{args.table}.png")
    if PAPERS[args.paper].TABLES[args.table].draw:
        figures.check_output(path)
    elif args.output:
        raise InputError(f"--output={args.output}: {args.table} is not a figure; remove it")
    return path


# -- the runs of a cell --------------------------------------------------------------------------


def list_runs(cell: Cell, args: Any, overrides: Sequence[tuple[str, str]] = ()) -> list[SweepRun]:
    """Lists the runs of a cell: all that is searched with every seed."""
    paper = PAPERS[args.paper]
    backbone = args.backbone or paper.HUB[cell.backbone]
    given_fields = dict(overrides)
    changes = paper.changes_of(cell, args, given_fields, backbone)
    if args.data:
        changes["data.source"] = str(Path(args.data) / cell.task)
    config, name = paper.config_of(cell, args), re.sub(r"[^\w.]+", "_", cell.row)
    runs = []
    rates = _numbers("--learning-rates", args.learning_rates, float) or paper.rates(cell, backbone)
    axes = {"optim.lr": rates, **paper.searched(cell)} if cell.does == "train" else {}
    # What is given is not searched.
    axes = {field: values for field, values in axes.items() if values and field not in given_fields}
    seeds = seeds_of(cell, args)[: 1 if cell.once else None]
    for *values, seed in itertools.product(*axes.values(), seeds):
        run_changes = dict(zip(axes, values, strict=True))
        parts = [f"{field.rpartition('.')[2]}={value}" for field, value in run_changes.items()]
        folder = Path(args.workdir) / ",".join([f"{name}-{cell.task}", *parts, f"seed={seed}"])
        run_changes |= dict.fromkeys(paper.SEEDED, seed)
        derived = paper.follows(cell, changes | run_changes)
        run_changes |= {field: value for field, value in derived.items() if field not in changes}
        runs.append(SweepRun(folder.name, config, changes | run_changes, folder))
    return runs


def seeds_of(cell: Cell, args: Any) -> Sequence[int]:
    """Lists the seeds of a cell: those of --seeds, else the paper's."""
    return _numbers("--seeds", args.seeds, int) or PAPERS[args.paper].seeds_of(cell)


def _numbers(flag: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",") if part.strip()))
    except ValueError as error:
        number_kind = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{flag}={text!r} must be {number_kind} separated by commas") from error


def check_inputs(run: SweepRun, args: Any) -> None:
    """Raises InputError for what a run lacks: a prompt, data, or a field of its config."""
    source = run.changes.get("data.source")
    if problem := PAPERS[args.paper].lacks(run, args):
        raise InputError(problem)
    if args.data and not Path(source).is_dir():
        raise InputError(f"{source} does not exist; --data must have one folder per task")
    try:
        check_config(sweep.load_run_config(run, ()))
    except InputError as error:
        flags = {"data.source": FLAGS["data.source"], **PAPERS[args.paper].FLAGS}
        flag = next((flag for field, flag in flags.items() if field in str(error)), "")
        advice = f"; {flag} sets it here" if flag else ""
        raise InputError(f"{run.row}: {error}{advice}") from error


def execute(runs: Sequence[tuple[Cell, list[SweepRun]]], args: Any) -> dict[str, str] | None:
    """Trains the runs without a result. -> errors by name, None where SIGTERM ended it early

    Raises InputError before the first where any cannot run, for a table takes hours.
    """
    folds = [fold for cell, cell_runs in runs for fold, _ in list_folds(cell, cell_runs)]
    for run in [cell_runs[0] for _, cell_runs in runs] + folds[:1]:
        check_inputs(run, args)
    # Of a cell with folds one of the runs per seed is trained, the folds say which.
    runs_by_folder = {
        run.workdir: (cell, run) for cell, cell_runs in runs for run in cell_runs if not cell.folds
    }
    workdirs = [*runs_by_folder, *(run.workdir for run in folds)]
    num_finished = sum((folder / RESULT).exists() for folder in workdirs)
    print(f"{args.table}: {len(workdirs)} runs, {num_finished} of them finished", file=sys.stderr)
    about = {"paper": args.paper, "table": args.table, **PAPERS[args.paper].about(args)}
    write_atomic(make_folder(args.workdir) / "table.json", json.dumps(about) + "\n")
    failed = {}
    for cell, run in runs_by_folder.values():
        if cell.does != "train":
            try:
                score(run, cell.does)
            except InputError as error:
                failed[run.workdir.name] = str(error)
    for line in list_failures(failed):
        print(escape(f"papers: {line}"), file=sys.stderr)
    fold_errors = sweep.execute(folds, (), str(Path(args.workdir) / "folds")) if folds else {}
    if fold_errors is None:
        return None
    failed |= fold_errors
    trained = [run for cell, run in runs_by_folder.values() if cell.does == "train"]
    trained += [
        run for cell, cell_runs in runs if cell.folds for run in chosen_by_folds(cell, cell_runs)
    ]
    errors = sweep.execute(trained, (), args.workdir) if trained else {}
    return None if errors is None else failed | errors


def score(run: SweepRun, kind: str) -> None:
    """Scores the test split with what trains nothing, and leaves what a run leaves of it.

    Raises InputError where the folder has a result of another config or backbone.
    """
    c = sweep.load_run_config(run, ())
    free = tuple(name for name in CHANGEABLE_FIELDS if name != "backbone.path")
    bind_workdir(make_folder(run.workdir), c.to_dict(), free)
    if read_result(run.workdir) is not None:
        return
    print(escape(f"-- {run.workdir.name}"), file=sys.stderr)
    metrics = majority(c, "test", None) if kind == "majority" else evaluate(c, None, "test")
    scores = {name: value for name, value in metrics.items() if isinstance(value, float)}
    write_result(run.workdir, RunResult(best_step=0, test=scores))  # as the backbone comes


# -- results -------------------------------------------------------------------------------------


def heading(
    args: Any, measured: Sequence[tuple[Cell, Measured]], overrides: Sequence[tuple[str, str]] = ()
) -> str:
    """Returns what a table shows, and which backbones and settings differ from the paper."""
    metrics: dict[str, list[str]] = {}
    for task, metric in dict.fromkeys((cell.task, cell.metric) for cell, _ in measured):
        metrics.setdefault(metric or metric_of(task), []).append(task)
    names = [f"{name} of {', '.join(tasks)}" for name, tasks in metrics.items()]
    paper = PAPERS[args.paper]
    table = paper.TABLES[args.table]
    seeds = sorted({seed for cell, _ in measured for seed in seeds_of(cell, args)})
    lines = [
        f"{paper.TITLE}, {args.table}: {table.about}",
        f"test {'; '.join(names)}; mean ± standard deviation over seeds "
        f"{','.join(map(str, seeds))}, in percent",
    ]
    if not table.draw or read_published(args.paper, args.table):
        lines[-1] += "; [as published]"
    if any(cell_scores.best for _, cell_scores in measured):
        lines.append(
            f"mean of the {paper.BEST} seeds that are best on dev (as in the paper), and of all"
        )
    elif paper.BEST:
        lines.append(f"mean of all seeds; the paper reports its {paper.BEST} best ones")
    if any(cell_scores.runs for _, cell_scores in measured):
        lines += paper.remarks(args)
    for cell, cell_scores in measured:
        for path in cell_scores.backbones:
            same = Path(path).name == Path(paper.HUB[cell.backbone]).name
            if not same or cell.backbone in paper.STAND_INS:
                lines.append(f"measured on {path}; the paper uses {cell.backbone}")
    if args.learning_rates:
        lines.append(f"learning rates {args.learning_rates} instead of those of the paper")
    changes = [
        change
        for cell, cell_scores in measured
        for change in list_changes(cell, cell_scores, args, overrides)
    ]
    if changes:
        settings = ", ".join(dict.fromkeys(changes))
        lines.append(f"settings that differ from the paper (its values in brackets): {settings}")
    return "\n".join(dict.fromkeys(lines))


def list_changes(
    cell: Cell, cell_scores: Measured, args: Any, overrides: Sequence[tuple[str, str]]
) -> list[str]:
    """Lists the settings of a cell's runs that differ from the paper."""
    if not cell_scores.runs:
        return []
    paper, first = PAPERS[args.paper], list_runs(cell, args)[0]
    config = sweep.load_run_config(first, ())
    published = flatten_config(json.loads(config.to_json()))  # as config.json is read
    searched = (*PLACE, *paper.FLAGS, *paper.searched(cell), *paper.follows(cell, first.changes))
    searched_settings = [
        f"{field}={value} (searched)" for field, value in overrides if field in paper.searched(cell)
    ]
    return searched_settings + [
        f"{field}={config[field]} ({value})"
        for config in cell_scores.configs
        for field, value in published.items()
        if config.get(field, value) != value and not field.startswith(searched)
    ]


def main(argv: Sequence[str]) -> int:
    """Runs the cells that are asked for, and prints or draws all that have results."""
    args, overrides = make_parser(argv).read(argv)
    check_known("the paper", args.paper, PAPERS)
    paper = PAPERS[args.paper]
    if args.table not in paper.TABLES:
        names = ", ".join(paper.TABLES)
        raise InputError(f"{args.table} is not a table or figure of this paper; use one of {names}")
    table = paper.TABLES[args.table]
    check_overrides(args, overrides)
    bind(args)
    picture = picture_path(args)
    runs = [(cell, list_runs(cell, args, overrides)) for cell in pick(table, args)]
    todo = [(cell, cell_runs) for cell, cell_runs in runs if not paper.why_not(cell, args)]
    if not args.print:
        log_left_out([cell for cell, _ in runs], args)
    if args.estimate:
        print(estimate(todo, overrides))
        return 0
    errors = {} if args.print else execute(todo, args)
    if errors is None:
        return 0
    measured = [(cell, measure(cell, cell_runs, paper.BEST)) for cell, cell_runs in runs]
    print(
        heading(args, measured, overrides), show(measured, read_published(args.paper, args.table)),
        sep="\n\n",
    )  # fmt: skip
    if table.draw and any(results.runs for _, results in measured):
        points = list_points(paper, measured)
        for path in figures.write(picture, table.draw(points), points, table.axis):
            print(path, file=sys.stderr)
    if errors:
        raise InputError(f"{len(errors)} runs failed; the lines above the table say why")
    return 0
