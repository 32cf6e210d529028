"""Tables of results, and lists of failed runs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxprompt.scoring.metrics import mean_std
from jaxprompt.training.run_result import RunResult


class TableRun(NamedTuple):
    """A run of a table: its result, and the config values that differ within a row."""

    result: RunResult
    lr: float | None = None  # learning rate
    data_seed: int | None = None
    fold: int | None = None  # of a cross-validation
    only: str = ""  # data.only


def format_table(rows: Mapping[str, Sequence[TableRun]]) -> str:
    """Returns a Markdown table: mean and population standard deviation over the seeds."""
    all_results = [run.result for runs in rows.values() for run in runs]

    def first_metric(split: str) -> Callable[[RunResult], float | None]:
        """Returns a function that reads the first metric of a split, None without the split."""
        return lambda result: next(iter((getattr(result, split) or {}).values()), None)

    def held_out_metric(name: str) -> Callable[[RunResult], float | None]:
        return lambda result: (result.held_out or {}).get(name)

    columns = {split: first_metric(split) for split in ("dev", "test")}
    metrics = {next(iter(result.dev)) for result in all_results if result.dev}
    if any(result.held_out for result in all_results):
        columns = columns if metrics else {}
        columns |= {name: held_out_metric(name) for name in ("accuracy", "loss")}
    metric = f" {next(iter(metrics))}" if len(metrics) == 1 else ""
    titles = [name + metric * (name in ("dev", "test")) for name in columns]
    heads = ["method", "runs", "seeds", "learning rate", "trained", "share", *titles, "seconds"]
    table = [heads]
    for row, runs in rows.items():
        results = [run.result for run in runs]
        dev = results[0].dev or {}
        name = f" {next(iter(dev))}" if len(metrics) > 1 and dev else ""
        trained, total = results[0].trained or 0, results[0].total or 1
        seconds = [result.time["seconds"] for result in results if "seconds" in result.time]
        cells = [row, len(runs), _seeds(runs), _learning_rates(runs)]
        cells += [f"{trained:,}", f"{trained / total:.2%}"]
        for title, read in columns.items():
            cells.append(_mean(results, read) + name * (title in ("dev", "test")))
        cells.append(f"{mean_std(seconds)[0]:.0f}" if seconds else "-")
        table.append([str(cell) for cell in cells])
    return _align(table)


def _align(table: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with columns of equal width; its first row is the header."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    head, *rows = (
        f"| {' | '.join(cell.ljust(n) for cell, n in zip(row, widths, strict=True))} |"
        for row in table
    )
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([head, f"|{rule}|", *rows])


def _mean(results: Sequence[RunResult], read: Callable[[RunResult], float | None]) -> str:
    values = [value for value in map(read, results) if value is not None]
    if not values:
        return "-"
    mean, std = mean_std(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ± {std:.3f}"


def _seeds(runs: Sequence[TableRun]) -> str:
    """Lists the seeds, with the data seeds after a slash if these differ."""

    def format_seed(seed: int | None) -> int | str:
        return "-" if seed is None else seed

    pairs = [(format_seed(run.result.seed), format_seed(run.data_seed)) for run in runs]
    if all(run.fold is not None or run.only for run in runs):  # several runs per seed
        pairs = list(dict.fromkeys(pairs))
    has_data_seeds = len({data for _, data in pairs}) > 1
    return ", ".join(f"{seed}/{data}" if has_data_seeds else str(seed) for seed, data in pairs)


def _learning_rates(runs: Sequence[TableRun]) -> str:
    """Lists the learning rates; if there are several, with the number of runs of each."""
    counts = Counter("-" if run.lr is None else f"{run.lr:g}" for run in runs)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{lr} ({count})" for lr, count in counts.items())


def list_failures(failed: Mapping[str, str]) -> list[str]:
    """Lists each error once, with the first run that has it and the number of other runs."""
    runs: dict[str, list[str]] = {}
    for name, error in failed.items():
        runs.setdefault(error, []).append(name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {error}"
        for error, names in runs.items()
    ]
