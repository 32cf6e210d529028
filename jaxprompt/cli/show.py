"""Shows the state of a run, its best score, and its curves in the terminal."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from jaxprompt.cli import print_text
from jaxprompt.cli.listing import columns
from jaxprompt.cli.options import Parser, path
from jaxprompt.cli.results import runs_below
from jaxprompt.config.documents import Document
from jaxprompt.errors import InputError
from jaxprompt.files import dumps, is_locked
from jaxprompt.training.pace import format_score
from jaxprompt.training.run_record import (
    AdaptationRecord,
    PretrainingData,
    RunRecord,
    SharedRecord,
    TaskData,
)
from jaxprompt.training.run_result import RunResult

if TYPE_CHECKING:
    from jaxprompt.training.progress import Evaluation

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60  # characters of a curve


def main(argv: Sequence[str]) -> int:
    """Prints one run, or a line for each run in a folder. Exit code 0."""
    parser = Parser(__name__, __doc__, config=False)
    parser.add_argument("workdir", type=path, help="folder of a run, or of several")
    folder = Path(parser.read(argv)[0].workdir)
    runs = runs_below(folder)
    if not runs:
        raise InputError(
            f"{folder} contains no run (no config.json of one); give the --workdir of `train`"
        )
    if runs == [folder]:
        print_text(format_run(folder))
        return 0
    print_text(
        columns([("run", "state", "best step", "dev"), *(_row(folder, run) for run in runs)])
    )
    return 0


def print_result(result: RunResult, workdir: str, as_json: bool) -> None:
    """Prints what a command has trained: a summary in a terminal, otherwise one line of JSON."""
    if as_json or not sys.stdout.isatty():
        print(dumps(result.to_json()))
    else:
        print(format_summary(Path(workdir)))


def format_run(workdir: Path) -> str:
    """Returns the description of one run."""
    from jaxprompt.training.pictures import read_curves
    from jaxprompt.training.run_folder import read_result

    result = read_result(workdir)
    best = None if result is None else result.best_step
    parts = [format_summary(workdir)]
    for name, points in read_curves(workdir).items():
        parts.append(_curve(name, points, best if name.startswith("dev") else None))
    return "\n\n".join(parts)


def format_summary(workdir: Path) -> str:
    """Returns the state of a run, its data, its scores, and how to export it."""
    from jaxprompt.training.run_folder import read_record, read_result

    result, record = read_result(workdir), read_record(workdir, RunRecord)
    rows: list[tuple[str, object]] = [("run", workdir), ("state", _state(workdir, result))]
    if record is not None:
        rows += _data_rows(record)
    for split in ("dev", "test", "held_out"):
        if scores := getattr(result, split, None):
            rows.append((split, _scores(scores)))
    if result:
        rows.append(_output(workdir, record))
    elif best := _best_so_far(workdir):
        rows.append(("dev", f"{_scores(best.dev)}, best so far, at step {best.step}"))
    return columns(rows)


def _best_so_far(workdir: Path) -> "Evaluation | None":
    """Returns the best evaluation of an unfinished run, None before its first checkpoint."""
    from jaxprompt.training.checkpoint import Checkpoints
    from jaxprompt.training.progress import Progress

    checkpoints = Checkpoints(workdir)
    with suppress(InputError):  # a run in progress may delete what is read here
        if checkpoints.latest() is not None:
            return Progress.from_json(checkpoints.position()).best
    return None


def _output(workdir: Path, record: RunRecord | None) -> tuple[str, object]:
    if isinstance(record, AdaptationRecord):
        return "backbone", workdir / "backbone"
    if isinstance(record, SharedRecord):  # exports the prompt of each task itself
        return "exported", workdir / "export"
    return "export", f"python -m jaxprompt export --workdir={shlex.quote(str(workdir))}"


def _state(workdir: Path, result: RunResult | None) -> str:
    from jaxprompt.training.checkpoint import Checkpoints
    from jaxprompt.training.run_folder import read_failure

    if result:
        return f"finished after {result.steps} steps, best at step {result.best_step}"
    if (failure := read_failure(workdir)) is not None:
        return f"failed, will not be retried by its grid: {failure}"
    step, grid = Checkpoints(workdir).latest(), Checkpoints(workdir.parent)
    # The runs of a grid that train at once have one checkpoint.
    if step is None and grid.latest() is not None:
        with suppress(InputError):  # a grid in progress may delete what is read here
            step = grid.latest() if workdir.name in grid.position().get("runs", ()) else None
    saved = "before its first checkpoint" if step is None else f"saved at step {step}"
    if is_locked(workdir):
        return f"running, {saved}"
    return f"stopped, {saved}; the same command {'starts it again' if step is None else 'resumes'}"


def _data_rows(record: Document) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    if isinstance(record, SharedRecord):
        for name, task in record.tasks.items():
            rows += [(f"{name}, {kind}", value) for kind, value in _data_rows(task)]
    if isinstance(record, TaskData):
        sizes = (f"{name} {split.examples}" for name, split in record.splits.items())
        rows += [("task", record.task.name), ("examples", ", ".join(sizes))]
    if isinstance(record, TaskData | PretrainingData):
        rows.append(("template", record.template))
    return rows


def _scores(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_score(value)}" for name, value in values.items())


def _curve(title: str, points: list[tuple[int, float]], best: int | None) -> str:
    """Draws values over steps as bars, with the lowest, highest and last value."""
    size = -(-len(points) // WIDTH)  # points whose mean is one bar
    means = [
        sum(value for _, value in points[i : i + size]) / len(points[i : i + size])
        for i in range(0, len(points), size)
    ]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0
    bars = "".join(BARS[round((mean - low) * scale)] for mean in means)
    values = [value for _, value in points]
    heading = f"{title}: {min(values):.4g} to {max(values):.4g}, last {values[-1]:.4g}"
    heading += f", best at step {best}" if best is not None else ""
    return f"{heading}\n  {bars}\n  step {points[0][0]} to {points[-1][0]}"


def _row(folder: Path, workdir: Path) -> tuple[object, ...]:
    from jaxprompt.training.run_folder import read_result

    result = read_result(workdir)
    state = _state(workdir, result).partition(",")[0]
    scores = {} if result is None else result.selection
    best = "-" if result is None else result.best_step
    return workdir.relative_to(folder), state, best, _scores(dict(list(scores.items())[:1])) or "-"
