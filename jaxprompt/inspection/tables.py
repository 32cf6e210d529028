"""Tables of results, and lists of runs without one."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxprompt.scoring.metrics import mean_std


def table(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Tabulates results as Markdown: mean and population standard deviation over the seeds.

    Beside what result.json holds a result may have "lr", its learning rate, "data_seed", "fold",
    and "only", the part of the data that it is of.
    """
    every = [result for results in rows.values() for result in results]

    def first(split: str) -> Callable[[Mapping[str, Any]], float | None]:
        """Reads the first metric of a split, None where a result lacks the split."""
        return lambda result: next(iter(result[split].values())) if split in result else None

    shown = {split: first(split) for split in ("dev", "test")}
    metrics = {next(iter(result["dev"])) for result in every if "dev" in result}
    if any("held_out" in result for result in every):
        held = lambda name: lambda result: result.get("held_out", {}).get(name)
        shown = (shown if metrics else {}) | {name: held(name) for name in ("accuracy", "loss")}
    metric = f" {next(iter(metrics))}" if len(metrics) == 1 else ""
    titles = [name + metric * (name in ("dev", "test")) for name in shown]
    heads = ["method", "runs", "seeds", "learning rate", "trained", "share", *titles, "seconds"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row, results in rows.items():
        own = results[0].get("dev", {})
        name = f" {next(iter(own))}" if len(metrics) > 1 and own else ""
        trained, total = results[0]["trained"], results[0]["total"]
        seconds = mean_std([r["time"]["seconds"] for r in results])[0]
        cells = [row, len(results), _seeds(results), _rates(results)]
        cells += [f"{trained:,}", f"{trained / total:.2%}"]
        for title, read in shown.items():
            cells.append(_mean(results, read) + name * (title in ("dev", "test")))
        cells.append(f"{seconds:.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _mean(
    results: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], float | None]
) -> str:
    values = [value for value in map(read, results) if value is not None]
    if not values:
        return "-"
    mean, std = mean_std(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ± {std:.3f}"


def _seeds(results: Sequence[Mapping[str, Any]]) -> str:
    """Lists the seeds, each with its data seed behind a slash where these differ."""
    pairs = [(r.get("seed", "-"), r.get("data_seed", "-")) for r in results]
    if all("fold" in r or "only" in r for r in results):  # several runs of each seed
        pairs = list(dict.fromkeys(pairs))
    both = len({data for _, data in pairs}) > 1
    return ", ".join(f"{seed}/{data}" if both else str(seed) for seed, data in pairs)


def _rates(results: Sequence[Mapping[str, Any]]) -> str:
    """Lists the learning rates; where several were chosen, how often each."""
    counts = Counter(f"{r['lr']:g}" if "lr" in r else "-" for r in results)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{rate} ({count})" for rate, count in counts.items())


def failures(failed: Mapping[str, str]) -> list[str]:
    """Lists each error once, with the first run that has it and how many more there are."""
    runs: dict[str, list[str]] = {}
    for name, error in failed.items():
        runs.setdefault(error, []).append(name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {error}"
        for error, names in runs.items()
    ]
