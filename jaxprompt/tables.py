"""Tables of results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxprompt.metrics import mean_std


def table(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Tabulates results as Markdown: mean and population standard deviation over the seeds."""
    first = lambda split: lambda r: next(iter(r[split].values())) if split in r else None
    shown = {split: first(split) for split in ("dev", "test")}
    if any("held_out" in result for results in rows.values() for result in results):
        shown = {name: lambda r, name=name: r["held_out"][name] for name in ("accuracy", "loss")}
    lines = [
        f"| method | runs | trained | share | {' | '.join(shown)} | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, results in rows.items():

        def show(read: Callable[[Mapping[str, Any]], float | None], results=results) -> str:
            values = [value for value in map(read, results) if value is not None]
            if not values:
                return "-"
            mean, std = mean_std(values)
            return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ± {std:.3f}"

        trained, total = results[0]["trained"], results[0]["total"]
        seconds = mean_std([r["time"]["seconds"] for r in results])[0]
        cells = " | ".join(show(read) for read in shown.values())
        lines.append(
            f"| {row} | {len(results)} | {trained:,} | {trained / total:.2%} | {cells} "
            f"| {seconds:.0f} |"
        )
    return "\n".join(lines)
