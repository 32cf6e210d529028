"""Reproduces a table or figure of a paper and prints it beside the published numbers.

usage: python launch/paper.py ppt TABLE --workdir DIR [--backbone PATH] [--config.FIELD=VALUE ...]

PPT (Gu et al. 2022):
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
import paper_ppt  # noqa: E402
from paper_ppt import TABLES, Cell, Published  # noqa: E402

from configs.parts import ppt  # noqa: E402
from configs.ppt import learning_rates  # noqa: E402
from jaxprompt.assembly import from_config  # noqa: E402
from jaxprompt.assembly.load_config import fields, resolved  # noqa: E402
from jaxprompt.cli import sweep  # noqa: E402
from jaxprompt.cli.options import Parser  # noqa: E402
from jaxprompt.data.tasks import get_task  # noqa: E402
from jaxprompt.errors import InputError, choose  # noqa: E402
from jaxprompt.files import make_folder, write_atomic  # noqa: E402
from jaxprompt.training.run_folder import RESULT, read_result  # noqa: E402

CELLS = ROOT / "configs/ppt/cells.py"
FLAGS = {
    "backbone.path": "--backbone", "prompt.init": "--prompts", "optim.lr": "--learning-rates",
    "seed": "--seeds", "data.seed": "--seeds",
}  # fmt: skip
# What may differ from the paper's settings and change no number but by rounding.
PLACE = (
    *FLAGS, "corpus.", "data.source", "data.files.", "data.cache_dir", "data.multiple",
    "data.eval_batch",
    "mesh.", "cache.", "runs.", "backbone.stack", "backbone.remat", "backbone.attention",
    "train.log_steps", "train.save_steps", "train.tracker",
)  # fmt: skip


# -- what is asked for ---------------------------------------------------------------------------


def pick(table: paper_ppt.Table, args: Any) -> list[Cell]:
    """Lists the cells that are asked for. Raises InputError for an unknown row or task."""
    tasks = _listed("--tasks", args.tasks, table.known) or table.tasks
    cells = list(table.cells(tasks))
    rows = _listed("--rows", args.rows, list(dict.fromkeys(cell.row for cell in cells)))
    return [cell for cell in cells if not rows or cell.row in rows]


def _listed(flag: str, text: str, known: Sequence[str]) -> list[str]:
    return [choose(flag, part.strip(), known) for part in text.split(";") if part.strip()]


def why_not(cell: Cell, args: Any) -> str:
    """Says why a cell is not run, and what to do about it; "" where it is run."""
    adapted = args.adapted or (not args.backbone and cell.backbone == paper_ppt.ADAPTED)
    if cell.method == "lm_adapt" and not adapted:
        return "give --adapted, the backbone that `adapt` wrote"
    if args.rows:
        return ""
    if args.backbone and cell.row == f"full {cell.backbone}":
        return "it has another backbone; name it in --rows to run it on --backbone"
    if not args.backbone and cell.row in TABLES[args.table].stand_ins:
        return f"{cell.backbone} cannot be read; give --backbone"
    return ""


def tell_left_out(cells: Sequence[Cell], args: Any) -> None:
    """Says which rows are not run. Raises InputError where that is a row of --rows."""
    for row, reason in dict.fromkeys((cell.row, why_not(cell, args)) for cell in cells):
        if reason and args.rows:
            raise InputError(f"--rows={row}: {reason}")
        if reason:
            print(f"{row} is left out: {reason}", file=sys.stderr)


def bind(args: Any) -> None:
    """Fills in the kind of a workdir. Raises InputError where it is of another table or kind."""
    held = _read(Path(args.workdir) / "table.json")
    for name, value in (("table", args.table), ("kind", args.kind)):
        if held and value and held[name] != value:
            raise InputError(
                f"{args.workdir} holds runs of {name} {held[name]}, not {value}; take another "
                "--workdir"
            )
    args.kind = args.kind or held.get("kind", "t5")


def _read(path: Path) -> dict[str, Any]:
    """Reads an object, {} where there is none."""
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}); take another --workdir") from error


# -- the runs of a cell --------------------------------------------------------------------------


def list_runs(
    cell: Cell, args: Any, overrides: Sequence[tuple[str, str]] = ()
) -> list[sweep.SweepRun]:
    """Lists the runs of a cell: every learning rate with every seed, which draws the examples too.

    What `overrides` say of prompts is not said of full tuning, which has none.
    """
    asked = dict(overrides)
    if cell.method == "full":
        asked = {field: asked[field] for field in asked if not field.startswith("prompt.")}
    backbone = args.adapted if cell.method == "lm_adapt" else ""
    backbone = backbone or args.backbone or paper_ppt.HUB[cell.backbone]
    changes: dict[str, Any] = {**asked, "backbone.path": backbone, **cell.changes}
    if cell.method.endswith("ppt"):
        unified = cell.method.endswith("unified_ppt")
        changes["prompt.init"] = str(
            Path(args.prompts)
            / ("zh" if paper_ppt.is_chinese(cell.task) else "")
            / ("unified" if unified else ppt.TASKS[cell.task].group)
        )
    if args.data:
        changes["data.source"] = str(Path(args.data) / cell.task)
    config = f"{CELLS}:{choose('the task', cell.task, ppt.TASKS)},{cell.method},{args.kind}"
    name = re.sub(r"[^\w.]+", "_", cell.row)
    runs = []
    searched = learning_rates(cell.method, backbone)
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
    start, source = run.changes.get("prompt.init"), run.changes.get("data.source")
    if start and not Path(start).is_dir():
        raise InputError(
            f"{start} does not exist; pre-train it by configs/ppt/{Path(start).name}.py and "
            "`export` it there, name another folder by --prompts, or choose --rows"
        )
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
    about = {"paper": args.paper, "table": args.table, "kind": args.kind}
    write_atomic(make_folder(args.workdir) / "table.json", json.dumps(about) + "\n")
    return sweep.execute(every, (), args.workdir)


def estimate(
    runs: Sequence[tuple[Cell, list[sweep.SweepRun]]], overrides: Sequence[tuple[str, str]]
) -> str:
    """Lists how many runs there are of each size, with the command that estimates a step of one.

    Runs with a prompt on one backbone are of one size, and so is full tuning: batches are alike.
    """
    sizes: dict[tuple[str, str], list[sweep.SweepRun]] = {}
    for cell, own in runs:
        c = sweep.load(own[0], ())
        examples = {"fraction": "all examples", "kshot": f"{c.data.k} examples per class"}
        examples = examples.get(c.data.protocol, f"{c.data.n} examples")
        about = f"{c.train.total_epochs:g} epochs of {examples}, {c.data.batch} a step"
        trained = "a backbone" if cell.method == "full" else "a prompt"
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
            configs.append(fields(_read(run.workdir / "config.json")))
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
        text += f" [{beside.mean:.1f} ± {beside.std:.1f}]" if beside else ""
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
    lines = [
        f"PPT (Gu et al. 2022), {args.table}: {TABLES[args.table].about}",
        f"test {'; '.join(names)}; mean ± standard deviation over seeds {args.seeds}, in percent",
    ]
    if not TABLES[args.table].draw:
        lines[-1] += "; [as published]"
    if args.kind != "t5" and any(own.runs for _, own in measured):
        lines.append(f"measured with a backbone of kind {args.kind}, the paper's is t5")
    for cell, own in measured:
        for path in own.backbones:
            same = Path(path).name == Path(paper_ppt.HUB[cell.backbone]).name
            if not same or cell.backbone in paper_ppt.STAND_INS:
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
    tables = "\n".join(f"  {name:15} {table.about}" for name, table in TABLES.items())
    parser = Parser((__doc__ or "").replace("{tables}", tables), config=False)
    parser.prog = "paper.py"
    parser.add_argument("paper", help="ppt")
    parser.add_argument("table", help="one of those above")
    parser.add_argument("--workdir", required=True, help="folder of the runs, of one table")
    parser.add_argument(
        "--backbone", default="", help="folder, hub id or pkg:PACKAGE/FOLDER, in place of the "
        "paper's (T5 1.1 XXL; mT5 XXL for Chinese; all sizes for full tuning in table4)",
    )  # fmt: skip
    parser.add_argument("--kind", default="", help=f"of the backbone: {', '.join(ppt.ALL_KINDS)}")
    parser.add_argument("--adapted", default="", help="the backbone after LM adaptation")
    parser.add_argument(
        "--prompts", default="prompts",
        help="folder of the exported prompts nsp, nss, cls and unified; those of Chinese are in zh",
    )  # fmt: skip
    parser.add_argument("--data", default="", help="folder with a folder per task, not the hub's")
    parser.add_argument("--tasks", default="", help="only these, separated by semicolons")
    parser.add_argument("--rows", default="", help="only these, separated by semicolons")
    parser.add_argument("--seeds", default=",".join(map(str, ppt.SEEDS)))
    parser.add_argument("--learning-rates", default="", help="in place of the paper's grid")
    parser.add_argument("--output", default="", help="picture: .png, .pdf, .svg; in the workdir")
    do = parser.add_mutually_exclusive_group()
    do.add_argument("--print", action="store_true", help="show what has been run, run nothing")
    do.add_argument(
        "--estimate", action="store_true",
        help="print how many runs there are and the commands that estimate them, run nothing",
    )  # fmt: skip
    args, overrides = parser.read(argv)
    choose("the paper", args.paper, ["ppt"])
    if args.table not in TABLES:
        raise InputError(f"{args.table} is no table or figure here; known: {', '.join(TABLES)}")
    table = TABLES[args.table]
    for field, _ in overrides:
        if field in FLAGS:
            raise InputError(f"--config.{field} is set by {FLAGS[field]} here")
    bind(args)
    choose("--kind", args.kind, ppt.ALL_KINDS)
    if args.kind != "t5" and not (args.backbone or args.print):
        raise InputError(f"--kind={args.kind} needs --backbone, for the paper's is t5")
    if args.table == "table2" and ppt.ALL_KINDS[args.kind][1]:
        raise InputError(f"--kind={args.kind} has no soft tokens to initialise; leave -deep out")
    output = Path(args.output or Path(args.workdir) / f"{args.table}.png")
    if table.draw:
        figures.check_output(output)
    runs = [(cell, list_runs(cell, args, overrides)) for cell in pick(table, args)]
    todo = [(cell, own) for cell, own in runs if not why_not(cell, args)]
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
    print(heading(args, measured), show(measured, paper_ppt.read_published(args.table)), sep="\n\n")
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
