"""Prints or runs the runs that a config's sweep() yields, and tabulates their results."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxprompt.cli.options import Parser, call, load_config, load_module, need, override
from jaxprompt.errors import InputError

SEEDS = ("seed", "data.seed")  # runs that differ in these alone share a row


class Run(NamedTuple):
    """One run of a sweep."""

    row: str  # its row of the table
    config: str  # what --config says
    changes: dict[str, Any]  # field -> value
    workdir: Path


def main(argv: Sequence[str]) -> int:
    """Prints a command a run, or with --run runs those without a result; then the table."""
    parser = Parser(__doc__)
    parser.add_argument("--table", action="store_true", help="print the table of results alone")
    parser.add_argument("--run", action="store_true", help="run them here, one after another")
    args, overrides = parser.read(argv)
    need(args, "config", "workdir")
    runs = list_runs(args.config, args.workdir, overrides)
    failed = []
    if args.run:
        from jaxprompt.cli import train

        train.keep_compiled(Path(args.workdir) / "compiled")
        for run in runs:
            if train.read_result(run.workdir / "result.json") is None:
                print(f"-- {run.workdir.name}", file=sys.stderr)
                c = load_config(run.config, overrides)
                for field, value in run.changes.items():
                    override(c, field, str(value))
                try:
                    if train.run(c, str(run.workdir)) is None:
                        return 0  # SIGTERM: the same command goes on
                except InputError as error:
                    print(f"jaxprompt sweep: {run.workdir.name}: {error}", file=sys.stderr)
                    failed.append(run.workdir.name)
    elif not args.table:
        for run in runs:
            flags = [f"--config.{field}={value}" for field, value in overrides]
            flags += [f"--config.{field}={value}" for field, value in run.changes.items()]
            words = ["python", "-m", "jaxprompt", "train", f"--config={run.config}"]
            print(shlex.join([*words, f"--workdir={run.workdir}", *flags]))
    results = collect(runs)
    if results:
        print(table(results))
    if failed:
        raise InputError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}")
    return 0


def list_runs(config: str, workdir: str, overrides: Sequence[tuple[str, str]] = ()) -> list[Run]:
    """Reads sweep() of a config: it yields dicts of field -> value.

    The key "config" gives the argument of get_config, as in `--config=x.py:argument`. Raises
    InputError for an unknown field before anything runs.
    """
    file = config.partition(":")[0]
    if file.endswith(".json"):
        raise InputError(f"{file} has no sweep(); give a .py config")
    runs = []
    for point in call(load_module(file), "sweep", file):
        changes = dict(point)
        argument = changes.pop("config", None)
        path = config if argument is None else f"{file}:{argument}"
        c = load_config(path, overrides)
        for field, value in changes.items():
            override(c, field, str(value))
        parts = [] if argument is None else [argument]
        row = [*parts, *(f"{f}={v}" for f, v in changes.items() if f not in SEEDS)]
        name = [*parts, *(f"{f}={v}" for f, v in changes.items())]
        folder = Path(workdir) / "-".join(name).replace("/", "_").replace(" ", "")
        runs.append(Run(" ".join(row) or "all", path, changes, folder))
    if not runs:
        raise InputError(f"{file}: sweep() yields nothing")
    return runs


def collect(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Reads the results that are there, by row."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        path = run.workdir / "result.json"
        if path.exists():
            rows.setdefault(run.row, []).append(json.loads(path.read_text()))
    return rows


def table(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Tabulates results as Markdown: mean and population standard deviation over the seeds."""
    from jaxprompt.metrics import mean_std

    lines = [
        "| method | runs | trained | share | dev | test | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, results in rows.items():

        def show(split: str, results=results) -> str:
            values = [next(iter(r[split].values())) for r in results if split in r]
            if not values:
                return "-"
            mean, std = mean_std(values)
            return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ± {std:.3f}"

        trained, total = results[0]["trained"], results[0]["total"]
        seconds = mean_std([r["time"]["seconds"] for r in results])[0]
        lines.append(
            f"| {row} | {len(results)} | {trained:,} | {trained / total:.2%} | {show('dev')} "
            f"| {show('test')} | {seconds:.0f} |"
        )
    return "\n".join(lines)
