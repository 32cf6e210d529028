"""Prints or trains the runs of a config's sweep(), and prints a table of their results."""

import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxprompt import signals
from jaxprompt.cli import log
from jaxprompt.cli.options import Parser, choose_mesh, require_flags, whole
from jaxprompt.cli.results import SEEDS, SweepRun, collect, group_of, print_table, read_folder
from jaxprompt.config.files import call_config, load_module
from jaxprompt.config.load import load_config
from jaxprompt.config.run import CHANGEABLE_FIELDS, RunConfig
from jaxprompt.errors import InputError, at_least, brief, check_extra
from jaxprompt.files import NAME
from jaxprompt.inspection.tables import list_failures

_MAX_PART = 40  # letters of a value in the name of a folder that would be too long
_GRIDS = "`train --config.runs.seeds=0,1` trains several seeds without sweep()"


def main(argv: Sequence[str]) -> int:
    """Prints one command per run, or with --run trains the unfinished runs; then the table."""
    parser = Parser(__name__, __doc__)
    parser.add_argument(
        "--table",
        nargs="?",
        const="",
        metavar="DIR",
        help="only print the table of results; with DIR for any folder of runs",
    )
    parser.add_argument(
        "--run", action="store_true", help="train the runs here, those of equal shapes together"
    )
    parser.add_argument("--plot", default="", metavar="FILE", help="plot the table: .png or .svg")
    parser.add_argument(
        "--best",
        type=whole,
        default=0,
        metavar="N",
        help="add to each row one of its N runs that are best on dev",
    )
    args, overrides = parser.read(argv)
    at_least("--best", args.best, 0)
    if args.plot:
        check_extra("plots", "matplotlib", "--plot")
        from jaxprompt.training.pictures import check_picture

        check_picture(Path(args.plot))
    if args.table:
        unused = [f"--{name}" for name in ("run", "config", "workdir") if getattr(args, name)]
        if unused := unused + [f"--config.{field}" for field, _ in overrides]:
            raise InputError(
                f"--table={args.table} shows the runs of that folder and does not use {unused[0]}; "
                "remove it, or write --table without a folder for the runs of --workdir"
            )
        print_table(read_folder(args.table), {}, args.plot, args.best)
        return 0
    require_flags(args, "config", "workdir")
    runs = list_runs(args.config, args.workdir, overrides)
    if args.run:
        failed = execute(runs, overrides, args.workdir)
        if failed is None:
            return 0
        print_table(runs, failed, args.plot, args.best)
        return 0
    check_saved(runs, overrides)
    if args.table is None:
        for run in runs:
            flags = [f"--config.{field}={value}" for field, value in overrides]
            flags += [f"--config.{field}={value}" for field, value in run.changes.items()]
            words = ["python", "-m", "jaxprompt", "train", f"--config={run.config}"]
            print(shlex.join([*words, f"--workdir={run.workdir}", *flags]))
    elif not collect(runs):
        raise InputError(
            f"none of the {len(runs)} runs in {args.workdir} has a result; train them with --run"
        )
    print_table(runs, {}, args.plot, args.best)
    return 0


def check_saved(runs: Sequence[SweepRun], overrides: Sequence[tuple[str, str]]) -> None:
    """Raises InputError if a result was trained with another config than that of the sweep."""
    from jaxprompt.runs.grid.expand import without_grid
    from jaxprompt.training import run_folder

    for run in runs:
        if run_folder.read_result(run.workdir) is not None:
            config = without_grid(load_run_config(run, overrides))
            run_folder.check_workdir(run.workdir, config.to_dict(), CHANGEABLE_FIELDS)


def execute(
    runs: Sequence[SweepRun], overrides: Sequence[tuple[str, str]], workdir: str
) -> dict[str, str] | None:
    """Trains the unfinished runs, those of equal shapes `config.runs.size` at once.

    Returns:
      The errors of failed runs, by name; None if a signal stopped it, and the same call resumes.
    """
    from jaxprompt.build.check import check_config, check_packages
    from jaxprompt.parallel.compilation import enable_compilation_cache
    from jaxprompt.runs import train as tune
    from jaxprompt.runs.grid import runner
    from jaxprompt.runs.grid.expand import GridRun, without_grid
    from jaxprompt.training import run_folder

    loaded = [load_run_config(run, overrides) for run in runs]
    enable_compilation_cache(loaded[0].train.compilation_cache)
    size = max(config.runs.size for config in loaded)
    # Runs are grouped and recorded without the block `runs`.
    loaded = [choose_mesh(without_grid(config)) for config in loaded]
    for run, config in zip(runs, loaded, strict=True):
        try:
            check_config(config)
            check_packages(config)
        except InputError as error:
            raise InputError(f"{run.workdir.name}: {error}") from error
    grouped, single = split_runs(runs, loaded)
    failed: dict[str, str] = {}
    if grouped:
        outcome = runner.train_runs(
            grouped, workdir, stop_signal=signals.stop_requested, size=size, others=bool(single)
        )
        if outcome is None:
            return None
        failed |= outcome.failed
    finished = [
        GridRun(run.workdir.name, run.changes, c, run.workdir)
        for run, c in single
        if run_folder.read_result(run.workdir) is not None
    ]
    for grid_run in finished:
        try:
            run_folder.check_workdir(grid_run.folder, grid_run.config.to_dict(), CHANGEABLE_FIELDS)
        except InputError as error:
            failed[grid_run.name] = str(error)
    # Finished runs are not trained again, but their config and data must be the same.
    unchanged = [grid_run for grid_run in finished if grid_run.name not in failed]
    failed |= runner.find_changed_runs(unchanged, workdir)
    names = {grid_run.name for grid_run in finished}
    for run, config in single:
        if run.workdir.name not in names:
            log(f"-- {run.workdir.name}")
            try:
                if tune.train_prompt(config, str(run.workdir)) is None:
                    return None
            except InputError as error:
                failed[run.workdir.name] = str(error)
    for line in list_failures(failed):
        log(f"jaxprompt sweep: {line}")
    return failed


def load_run_config(run: SweepRun, overrides: Sequence[tuple[str, str]]) -> RunConfig:
    """Loads the config of a run. Raises InputError if it is itself a grid."""
    from jaxprompt.runs.grid.expand import is_grid

    # In the order of the command that the sweep prints.
    config = load_config(run.config, [*overrides, *run.changes.items()])
    if is_grid(config):
        raise InputError(
            f"{run.config} has both sweep() and config.runs; remove one of them: {_GRIDS}"
        )
    return config


def split_runs(
    runs: Sequence[SweepRun], configs: Sequence[RunConfig]
) -> tuple[list[Any], list[Any]]:
    """Divides runs into those that train together and those that train alone.

    A run that was started alone resumes alone; a run that no grid supports trains alone, too.
    """
    from jaxprompt.runs.grid.expand import GridRun, grid_conflict, group_by_config
    from jaxprompt.training.checkpoint import Checkpoints

    pairs = list(zip(runs, configs, strict=True))
    unstarted = [
        GridRun(run.workdir.name, run.changes, c, run.workdir)
        for run, c in pairs
        if Checkpoints(run.workdir).latest() is None and not grid_conflict(c)
    ]
    grouped = sum((alike for alike in group_by_config(unstarted) if len(alike) > 1), [])
    names = {run.name for run in grouped}
    return grouped, [(run, c) for run, c in pairs if run.workdir.name not in names]


def list_runs(
    config: str, workdir: str, overrides: Sequence[tuple[str, str]] = ()
) -> list[SweepRun]:
    """Reads sweep() of a config, which yields dicts of field -> value.

    The key "config" is the argument of get_config, as in `--config=x.py:argument`.

    Raises:
      InputError: before anything runs, for an unknown field, and for two runs that are the same
        or share a folder.
    """
    file = config.partition(":")[0]
    if file.endswith(".json") or not hasattr(module := load_module(file), "sweep"):
        raise InputError(f"{file} does not define sweep(); give a .py config with it: {_GRIDS}")
    runs: list[SweepRun] = []
    points: dict[Any, Any] = {}  # by what a run is, and by its folder
    for point in _read_points(call_config(module, "sweep", file), file):
        changes = dict(point)
        argument = changes.pop("config", None)
        path = config if argument is None else f"{file}:{argument}"
        clash = next((field for field, _ in overrides if field in changes), None)
        if clash is not None:
            raise InputError(f"{file}: sweep() sets {clash} of each run; remove --config.{clash}")
        parts = [] if argument is None else [str(argument)]
        row = [*parts, *(f"{f}={v}" for f, v in changes.items() if f not in SEEDS)]
        folder = Path(workdir) / _folder_of([*parts, *(f"{f}={v}" for f, v in changes.items())])
        try:  # wrong fields and values are reported before the first run
            load_config(path, [*overrides, *changes.items()])
        except InputError as error:
            raise InputError(f"{folder.name}: {error}") from error
        # In any order. Not the whole config: curves of a paper may share a point, as the depths of
        # P-tuning v2 do.
        key = path, frozenset((field, str(value)) for field, value in changes.items())
        if key in points:
            raise InputError(
                f"{file}: sweep() yields {brief(points[key])} and {brief(point)}, which are the "
                "same run; remove one"
            )
        if str(folder) in points:
            raise InputError(
                f"{file}: sweep() yields {brief(points[str(folder)])} and {brief(point)}, which "
                f"share the folder {folder.name} (/ becomes _, spaces are removed); rename one"
            )
        points[key] = points[str(folder)] = point
        group = group_of(path.partition(":")[2], changes)
        runs.append(SweepRun(" ".join(row) or "all", path, changes, folder, group))
    if not runs:
        raise InputError(f"{file}: sweep() yields nothing; yield a dict of fields for each run")
    return runs


def _folder_of(parts: Sequence[str]) -> str:
    """Names the folder of a run. If it is too long, long parts are cut and end in a digest."""

    def join(parts):
        return "-".join(parts).replace("/", "_").replace(" ", "")

    if len(join(parts).encode()) <= NAME:
        return join(parts)

    def digest(part):
        return hashlib.sha256(part.encode()).hexdigest()[:8]

    return join([f"{p[:_MAX_PART]}~{digest(p)}" if len(p) > _MAX_PART else p for p in parts])


def _read_points(points: Any, file: str) -> list[Mapping[str, Any]]:
    """Lists the points of sweep(). Raises InputError for one that is not a dict of fields."""
    advice = "yield a dict of fields for each run, e.g. {'seed': 1}"
    if not isinstance(points, Iterable) or isinstance(points, Mapping | str):
        raise InputError(f"{file}: sweep() returns {brief(points)}; {advice}")
    points = list(points)
    for point in points:
        if not isinstance(point, Mapping) or not all(isinstance(field, str) for field in point):
            raise InputError(f"{file}: sweep() yields {brief(point)}; {advice}")
    return points
