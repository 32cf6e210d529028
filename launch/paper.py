"""Runs a table of a paper, or some of its cells, and prints it beside the published figures.

usage: python launch/paper.py ppt TABLE --workdir DIR --backbone PATH [--config.FIELD=VALUE ...]

Tables of ppt: table4, initialization, hard_prompts, samples. What has a result is not run again;
runs of equal shapes train as one program. Of each seed the rate that is best on dev counts. A cell
is mean ± population standard deviation of the test split over the seeds, in percent, and beside it,
where this project knows it, what the paper has.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from configs.parts import ppt  # noqa: E402
from jaxprompt.cli import sweep  # noqa: E402
from jaxprompt.cli.options import Parser  # noqa: E402
from jaxprompt.errors import InputError, choose  # noqa: E402


class Cell(NamedTuple):
    """One setting on one task, with every seed and rate."""

    row: str
    task: str
    method: str
    changes: Mapping[str, Any] = {}  # field -> value, besides seed and rate


# Gu et al. 2022, table 4: T5-XXL, 32 rows. (row, task) -> mean and, where known, deviation.
PUBLISHED = {
    "table4": {
        ("pt", "sst2"): "70.5 ± 15.5", ("hybrid_pt", "sst2"): "87.6", ("lm_adapt", "sst2"): "77.6",
        ("ppt", "sst2"): "93.5 ± 0.3", ("unified_ppt", "sst2"): "94.4",
        ("pt", "cb"): "50.7", ("hybrid_pt", "cb"): "66.5", ("lm_adapt", "cb"): "61.2",
        ("ppt", "cb"): "71.2", ("unified_ppt", "cb"): "82.2",
    },
}  # fmt: skip
ENGLISH = ("sst2", "sst5", "race_middle", "race_high", "boolq", "rte", "cb")
PILOT = ("sst2", "boolq")  # of the studies of section 2


def table4(tasks: Sequence[str]) -> Iterable[Cell]:
    """Every method."""
    return (Cell(method, task, method) for method in ppt.METHODS for task in tasks)


def initialization(tasks: Sequence[str]) -> Iterable[Cell]:
    """Where the soft tokens of prompt tuning start from (section 2)."""
    starts = ("normal", "labels", "vocab", "frequent", "task")
    for task in tasks:
        yield from (Cell(start, task, "pt", {"prompt.start": start}) for start in starts)
        yield Cell("full", task, "full")


def hard_prompts(tasks: Sequence[str]) -> Iterable[Cell]:
    """Words beside the soft tokens, and words for the labels (section 2)."""
    for task in tasks:
        for name, template in ppt.HARD[task].items():
            yield Cell(name, task, "pt", {"task.template": template})
        for words in ppt.WORDS[task]:
            yield Cell("/".join(words), task, "pt", {"task.words": ",".join(words)})


def samples(tasks: Sequence[str]) -> Iterable[Cell]:
    """Prompt tuning, PPT and full fine-tuning with 32 to 256 rows (section 4.4)."""
    for rows in ppt.ROWS:
        for method in ("full", "pt", "ppt", "unified_ppt"):
            for task in tasks:
                yield Cell(f"{method}, {rows} rows", task, method, {"data.n": rows})


class Table(NamedTuple):
    """A table and its tasks."""

    cells: Callable[[Sequence[str]], Iterable[Cell]]
    tasks: Sequence[str]  # without --tasks
    known: Sequence[str]


TABLES = {
    "table4": Table(table4, ENGLISH, tuple(ppt.TASKS)),
    "initialization": Table(initialization, PILOT, tuple(ppt.TASKS)),
    "hard_prompts": Table(hard_prompts, PILOT, PILOT),
    "samples": Table(samples, ENGLISH, tuple(ppt.TASKS)),
}


def pick(table: Table, args: Any) -> list[Cell]:
    """Lists the cells that are asked for. Raises InputError for an unknown row or task."""
    tasks = _listed("--tasks", args.tasks, table.known) or table.tasks
    cells = list(table.cells(tasks))
    rows = _listed("--rows", args.rows, list(dict.fromkeys(cell.row for cell in cells)))
    return [cell for cell in cells if not rows or cell.row in rows]


def _listed(flag: str, text: str, known: Sequence[str]) -> list[str]:
    return [choose(flag, part.strip(), known) for part in text.split(";") if part.strip()]


def list_runs(cell: Cell, args: Any, overrides: Sequence[tuple[str, str]] = ()) -> list[sweep.Run]:
    """Lists the runs of a cell: every rate with every seed, which draws the rows too.

    What `overrides` say of prompts is not said of full fine-tuning, which has none.
    """
    asked = dict(overrides)
    if cell.method == "full":
        asked = {field: asked[field] for field in asked if not field.startswith("prompt.")}
    changes: dict[str, Any] = {**asked, "backbone.path": args.backbone, **cell.changes}
    if cell.method == "lm_adapt":
        if not args.adapted:
            raise InputError("lm_adapt needs --adapted, the backbone that `adapt` wrote; or --rows")
        changes["backbone.path"] = args.adapted
    if cell.method.endswith("unified_ppt"):
        changes["prompt.init"] = f"{args.prompts}/unified"
    elif cell.method.endswith("ppt"):
        changes["prompt.init"] = f"{args.prompts}/{ppt.TASKS[cell.task].group}"
    if args.data:
        changes["data.source"] = str(Path(args.data) / cell.task)
    config = f"{ROOT / 'configs/ppt/cells.py'}:{cell.task},{cell.method},{args.kind}"
    rates = [float(x) for x in args.rates.split(",") if x] or ppt.RATES[cell.method]
    folder, runs = Path(args.workdir) / f"{cell.row}-{cell.task}".replace("/", "_"), []
    for rate in rates:
        for seed in (int(x) for x in args.seeds.split(",")):
            own = {"optim.lr": rate, "seed": seed, "data.seed": seed}
            name = f"{folder.name},lr={rate},seed={seed}".replace(" ", "")
            runs.append(sweep.Run(name, config, changes | own, folder.parent / name))
    return runs


def show(runs: Sequence[tuple[Cell, list[sweep.Run]]], published: Mapping[Any, str]) -> str:
    """Tabulates the cells that have results as Markdown, rows by tasks."""
    from jaxprompt.group import select
    from jaxprompt.metrics import mean_std

    shown = {}
    for cell, own in runs:
        paths = [(run, run.workdir / "result.json") for run in own]
        found = [
            (run.changes, json.loads(path.read_text())) for run, path in paths if path.exists()
        ]
        values = [100 * next(iter(r["test"].values())) for r in select(found) if "test" in r]
        text = "{:.1f} ± {:.1f}".format(*mean_std(values)) if values else "-"
        if len(values) not in (0, len({run.changes["seed"] for run in own})):
            text += f" ({len(values)} seeds)"
        paper = published.get((cell.row, cell.task))
        shown[cell.row, cell.task] = text + (f" [{paper}]" if paper else "")
    rows, tasks = (list(dict.fromkeys(key[i] for key in shown)) for i in range(2))
    lines = ["| | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    for row in rows:
        lines.append(f"| {row} | " + " | ".join(shown.get((row, t), "") for t in tasks) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Runs the cells that are asked for and prints the table of all that have results."""
    parser = Parser(__doc__, config=False)
    parser.add_argument("paper", choices=["ppt"])
    parser.add_argument("table", help=", ".join(TABLES))
    parser.add_argument("--workdir", required=True, help="folder of the runs")
    parser.add_argument("--backbone", required=True, help="folder, hub id or pkg:PACKAGE/FOLDER")
    parser.add_argument("--kind", default="t5", help=", ".join(ppt.ALL_KINDS))
    parser.add_argument("--adapted", default="", help="the backbone after LM adaptation")
    parser.add_argument("--prompts", default="prompts", help="folder of the exports nsp, nss ...")
    parser.add_argument("--data", default="", help="folder with one of each task; else its hub id")
    parser.add_argument("--tasks", default="", help="these alone, with semicolons")
    parser.add_argument("--rows", default="", help="these rows alone, with semicolons")
    parser.add_argument("--seeds", default=",".join(map(str, ppt.SEEDS)))
    parser.add_argument("--rates", default="", help="in place of the paper's grid")
    parser.add_argument("--print", action="store_true", help="print what is there, run nothing")
    args, overrides = parser.read(argv)
    choose("the table", args.table, TABLES)
    choose("--kind", args.kind, ppt.ALL_KINDS)
    if args.table == "initialization" and ppt.ALL_KINDS[args.kind][1]:
        raise InputError(f"--kind={args.kind} has no soft tokens to start; leave -deep out")
    cells = pick(TABLES[args.table], args)
    runs = [(cell, list_runs(cell, args, overrides)) for cell in cells]
    failed: dict[str, str] | None = {}
    if not args.print:
        failed = sweep.execute([run for _, own in runs for run in own], (), args.workdir)
        if failed is None:
            return 0
    print(show(runs, PUBLISHED.get(args.table, {})))
    if failed:
        raise InputError(f"{len(failed)} runs failed: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        sys.exit(f"paper.py: {error}")
