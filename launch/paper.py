"""Reproduces a table or figure of a paper and prints it beside the published numbers.

usage: python launch/paper.py PAPER TABLE --workdir DIR [--backbone PATH] [--config.FIELD=VALUE ...]

{tables}

A cell is mean ± population standard deviation of the test split over the seeds, in percent; for
each seed the learning rate that is best on dev counts. What the paper prints stands behind it in
brackets; "-" has not been run. Runs that have a result are not run again, and runs of equal shapes
train as one program. A figure is written with its numbers as CSV beside it.
"""

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]

import paper_figures as figures  # noqa: E402
from paper_dart import PAPER as DART  # noqa: E402
from paper_ppt import PAPER as PPT  # noqa: E402
from paper_table import (  # noqa: E402
    Cell,
    Paper,
    Published,
    Table,
    read_object,
    read_published,
)

from jaxprompt.assembly import from_config  # noqa: E402
from jaxprompt.assembly.load_config import fields, resolved  # noqa: E402
from jaxprompt.cli import sweep  # noqa: E402
from jaxprompt.cli.options import Parser  # noqa: E402
from jaxprompt.data.tasks import get_task  # noqa: E402
from jaxprompt.errors import InputError, choose  # noqa: E402
from jaxprompt.files import make_folder, write_atomic  # noqa: E402
from jaxprompt.training.run_folder import RESULT, read_result  # noqa: E402

PAPERS: dict[str, Paper] = {paper.NAME: paper for paper in (PPT, DART)}
FLAGS = {
    "backbone.path": "--backbone", "optim.lr": "--learning-rates", "seed": "--seeds",
    "data.seed": "--seeds",
}  # fmt: skip
# What may differ from the paper's settings and change no number but by rounding.
PLACE = (
    *FLAGS, "prompt.init", "corpus.", "data.source", "data.files.", "data.cache_dir",
    "data.multiple", "data.eval_batch", "mesh.", "cache.", "runs.", "backbone.stack",
    "backbone.remat", "backbone.attention", "train.log_steps", "train.save_steps", "train.tracker",
)  # fmt: skip


# -- what is asked for ---------------------------------------------------------------------------


def pick(table: Table, args: Any) -> list[Cell]:
    """Lists the cells that are asked for. Raises InputError for an unknown row or task."""
    tasks = _listed("--tasks", args.tasks, table.known) or table.tasks
    cells = list(table.cells(tasks))
    rows = _listed("--rows", args.rows, list(dict.fromkeys(cell.row for cell in cells)))
    return [cell for cell in cells if not rows or cell.row in rows]


def _listed(flag: str, text: str, known: Sequence[str]) -> list[str]:
    return [choose(flag, part.strip(), known) for part in text.split(";") if part.strip()]


def tell_left_out(cells: Sequence[Cell], args: Any) -> None:
    """Says which rows are not run. Raises InputError where that is a row of --rows."""
    why_not = PAPERS[args.paper].why_not
    for row, reason in dict.fromkeys((cell.row, why_not(cell, args)) for cell in cells):
        if reason and args.rows:
            raise InputError(f"--rows={row}: {reason}")
        if reason:
            print(f"{row} is left out: {reason}", file=sys.stderr)


def bind(args: Any) -> None:
    """Checks the paper's own flags. Raises InputError where the workdir is of another table."""
    held = read_object(Path(args.workdir) / "table.json")
    for name in ("paper", "table"):
        if held and held[name] != getattr(args, name):
            raise InputError(
                f"{args.workdir} holds runs of {name} {held[name]}, not {getattr(args, name)}; "
                "take another --workdir"
            )
    PAPERS[args.paper].check(args, held)


# -- the runs of a cell --------------------------------------------------------------------------


def list_runs(
    cell: Cell, args: Any, overrides: Sequence[tuple[str, str]] = ()
) -> list[sweep.SweepRun]:
    """Lists the runs of a cell: every learning rate with every seed, also of the examples."""
    paper = PAPERS[args.paper]
    backbone = args.backbone or paper.HUB[cell.backbone]
    changes = paper.changes_of(cell, args, dict(overrides), backbone)
    if args.data:
        changes["data.source"] = str(Path(args.data) / cell.task)
    config, name = paper.config_of(cell, args), re.sub(r"[^\w.]+", "_", cell.row)
    runs = []
    searched = paper.rates(cell, backbone)
    for lr in _numbers("--learning-rates", args.learning_rates, float) or searched:
        for seed in _numbers("--seeds", args.seeds, int):
            own = {"optim.lr": lr, "seed": seed, "data.seed": seed}
            folder = Path(args.workdir) / f"{name}-{cell.task},lr={lr},seed={seed}"
            runs.append(sweep.SweepRun(folder.name, config, changes | own, folder))
    return runs


def _numbers(flag: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InputError(f"{flag}={text!r} must be numbers with commas between") from error


def check_inputs(run: sweep.SweepRun, args: Any) -> None:
    """Raises InputError for what a run lacks: a prompt, data, or a field of its config."""
    source = run.changes.get("data.source")
    if lacking := PAPERS[args.paper].lacks(run, args):
        raise InputError(lacking)
    if args.data and not Path(source).is_dir():
        raise InputError(f"{source} does not exist; --data holds a folder of each task")
    try:
        from_config.check_config(sweep.load(run, ()))
    except InputError as error:
        raise InputError(f"{run.row}: {error}") from error


def execute(runs: Sequence[tuple[Cell, list[sweep.SweepRun]]], args: Any) -> dict[str, str] | None:
    """Trains the runs without a result. -> errors by name, None where SIGTERM ended it early

    Raises InputError before the first where any cannot run, for a table takes hours.
    """
    for _, own in runs:
        check_inputs(own[0], args)
    every = [run for _, own in runs for run in own]
    have = sum((run.workdir / RESULT).exists() for run in every)
    print(f"{args.table}: {len(every)} runs, {have} of them have a result", file=sys.stderr)
    about = {"paper": args.paper, "table": args.table, **PAPERS[args.paper].about(args)}
    write_atomic(make_folder(args.workdir) / "table.json", json.dumps(about) + "\n")
    return sweep.execute(every, (), args.workdir)


def estimate(
    runs: Sequence[tuple[Cell, list[sweep.SweepRun]]], overrides: Sequence[tuple[str, str]]
) -> str:
    """Lists how many runs there are of each size, with the command that estimates a step of one.

    Runs with a prompt on one backbone are of one size, and so is full tuning: batches are alike.
    """
    sizes: dict[tuple[str, str], list[sweep.SweepRun]] = {}
    for _, own in runs:
        c = sweep.load(own[0], ())
        examples = {"fraction": "all examples", "kshot": f"{c.data.k} examples per class"}
        examples = examples.get(c.data.protocol, f"{c.data.n} examples")
        about = f"{c.train.total_epochs:g} epochs of {examples}, {c.data.batch} a step"
        trained = "a backbone" if c.trainable else "a prompt"
        sizes.setdefault((f"{about}, that train {trained}", c.backbone.path), []).extend(own)
    lines = []
    for (about, backbone), own in sizes.items():
        given = [*overrides, ("backbone.path", backbone)]
        flags = [f"--config.{field}={value}" for field, value in given]
        words = ["python", "-m", "jaxprompt", "plan", f"--config={own[0].config}", *flags]
        lines.append(f"{len(own)} runs of {about}:\n  {shlex.join(words)} --devices=...")
    return "\n".join(lines)


# -- what they give ------------------------------------------------------------------------------


class Measured(NamedTuple):
    """A cell's results, in percent."""

    mean: float
    std: float
    runs: int  # that have a result, of `total`
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


def measure(runs: Sequence[sweep.SweepRun]) -> Measured:
    """Reads what the runs of a cell gave; NaN where none has a result."""
    from jaxprompt.scoring.metrics import mean_std
    from jaxprompt.sweeps.runner import select

    found, configs = [], []
    for run in runs:
        result = read_result(run.workdir)
        if result and "test" in result:
            found.append((run.changes, result))
            configs.append(fields(read_object(run.workdir / "config.json")))
    values = [100 * next(iter(result["test"].values())) for result in select(found)]
    mean, std = mean_std(values) if values else (math.nan, math.nan)
    return Measured(mean, std, len(found), len(runs), tuple(configs))


def show(
    measured: Sequence[tuple[Cell, Measured]], published: Mapping[tuple[str, str], Published]
) -> str:
    """Tabulates cells as Markdown, rows by tasks: measured, and published in brackets."""
    shown = {}
    for cell, own in measured:
        text = f"{own.mean:.1f} ± {own.std:.1f}" if own.runs else "-"
        if 0 < own.runs < own.total:
            text += f" ({own.runs} of {own.total} runs)"
        beside = published.get((cell.row, cell.task))
        if beside:
            spread = "" if beside.std is None else f" ± {beside.std:.1f}"
            text += f" [{beside.mean:.1f}{spread}]"
        shown[cell.row, cell.task] = text
    rows, tasks = (list(dict.fromkeys(key[i] for key in shown)) for i in range(2))
    lines = ["| | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    for row in rows:
        lines.append(f"| {row} | " + " | ".join(shown.get((row, t), "") for t in tasks) + " |")
    return "\n".join(lines)


def metric_of(task: str) -> str:
    """Names the metric of a task."""
    return get_task(task).metric.replace("macro_f1", "macro-F1")


def heading(args: Any, measured: Sequence[tuple[Cell, Measured]]) -> str:
    """Says what a table shows, and where the backbone is not the paper's."""
    metrics: dict[str, list[str]] = {}
    for task in dict.fromkeys(cell.task for cell, _ in measured):
        metrics.setdefault(metric_of(task), []).append(task)
    names = [f"{name} of {', '.join(own)}" for name, own in metrics.items()]
    paper = PAPERS[args.paper]
    table = paper.TABLES[args.table]
    lines = [
        f"{paper.TITLE}, {args.table}: {table.about}",
        f"test {'; '.join(names)}; mean ± standard deviation over seeds {args.seeds}, in percent",
    ]
    if not table.draw:
        lines[-1] += "; [as published]"
    if any(own.runs for _, own in measured):
        lines += paper.remarks(args)
    for cell, own in measured:
        for path in own.backbones:
            same = Path(path).name == Path(paper.HUB[cell.backbone]).name
            if not same or cell.backbone in paper.STAND_INS:
                lines.append(f"measured on {path}, the paper has {cell.backbone}")
    if args.learning_rates:
        lines.append(f"learning rates {args.learning_rates} in place of the paper's")
    changes = [change for cell, own in measured for change in list_changes(cell, own, args)]
    if changes:
        shown = ", ".join(dict.fromkeys(changes))
        lines.append(f"settings that differ from the paper's (in brackets): {shown}")
    return "\n".join(dict.fromkeys(lines))


def list_changes(cell: Cell, own: Measured, args: Any) -> list[str]:
    """Lists the settings of a cell's runs that are not the paper's."""
    if not own.runs:
        return []
    published = fields(resolved(sweep.load(list_runs(cell, args)[0], ())))
    return [
        f"{field}={config[field]} ({value})"
        for config in own.configs
        for field, value in published.items()
        if config.get(field, value) != value and not field.startswith(PLACE)
    ]


def list_points(measured: Sequence[tuple[Cell, Measured]]) -> list[figures.Point]:
    """Makes the numbers of a figure."""
    points = []
    for cell, own in measured:
        examples = "all" if "data.protocol" in cell.changes else str(cell.changes.get("data.n", 32))
        points.append(
            figures.Point(
                cell.task, cell.method, examples, metric_of(cell.task), own.mean, own.std,
                own.runs, own.total, " ".join(own.backbones),
            )
        )  # fmt: skip
    return points


def main(argv: Sequence[str]) -> int:
    """Runs the cells that are asked for, and prints or draws all that have results."""
    known = [
        f"{paper.TITLE}, PAPER = {paper.NAME}:\n"
        + "\n".join(f"  {name:15} {table.about}" for name, table in paper.TABLES.items())
        for paper in PAPERS.values()
    ]
    parser = Parser((__doc__ or "").replace("{tables}", "\n\n".join(known)), config=False)
    parser.prog = "paper.py"
    parser.add_argument("paper", help=f"one of {', '.join(PAPERS)}")
    parser.add_argument("table", help="one of those above")
    parser.add_argument("--workdir", required=True, help="folder of the runs, of one table")
    parser.add_argument(
        "--backbone", default="", help="folder, hub id or pkg:PACKAGE/FOLDER, in place of the "
        "paper's",
    )  # fmt: skip
    asked = [paper for name, paper in PAPERS.items() if name in argv] or list(PAPERS.values())
    for paper in asked:
        paper.add_flags(parser)
    parser.add_argument("--data", default="", help="folder with a folder per task, not the hub's")
    parser.add_argument("--tasks", default="", help="only these, separated by semicolons")
    parser.add_argument("--rows", default="", help="only these, separated by semicolons")
    parser.add_argument("--seeds", default="", help="in place of the paper's")
    parser.add_argument("--learning-rates", default="", help="in place of the paper's grid")
    parser.add_argument("--output", default="", help="picture: .png, .pdf, .svg; in the workdir")
    do = parser.add_mutually_exclusive_group()
    do.add_argument("--print", action="store_true", help="show what has been run, run nothing")
    do.add_argument(
        "--estimate", action="store_true",
        help="print how many runs there are and the commands that estimate them, run nothing",
    )  # fmt: skip
    args, overrides = parser.read(argv)
    choose("the paper", args.paper, PAPERS)
    paper = PAPERS[args.paper]
    if args.table not in paper.TABLES:
        known = ", ".join(paper.TABLES)
        raise InputError(f"{args.table} is no table or figure here; known: {known}")
    table = paper.TABLES[args.table]
    for field, _ in overrides:
        if field in (flags := FLAGS | paper.FLAGS):
            raise InputError(f"--config.{field} is set by {flags[field]} here")
    args.seeds = args.seeds or ",".join(map(str, paper.SEEDS))
    bind(args)
    output = Path(args.output or Path(args.workdir) / f"{args.table}.png")
    if table.draw:
        figures.check_output(output)
    runs = [(cell, list_runs(cell, args, overrides)) for cell in pick(table, args)]
    todo = [(cell, own) for cell, own in runs if not paper.why_not(cell, args)]
    if args.estimate:
        print(estimate(todo, overrides))
        return 0
    failed: dict[str, str] | None = {}
    if not args.print:
        tell_left_out([cell for cell, _ in runs], args)
        failed = execute(todo, args)
        if failed is None:
            return 0
    measured = [(cell, measure(own)) for cell, own in runs]
    print(
        heading(args, measured), show(measured, read_published(args.paper, args.table)), sep="\n\n"
    )
    if table.draw and any(own.runs for _, own in measured):
        points = list_points(measured)
        for path in figures.write(output, table.draw(points), points):
            print(path, file=sys.stderr)
    if failed:
        raise InputError(f"{len(failed)} runs failed; the lines above the table say why")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        print(f"paper.py: {error}", file=sys.stderr)
        sys.exit(2)
