"""Seconds of scoring four label words by their rows (first) or by all (second): head and step."""

import argparse

from launch.bench.lm import MEASURED, flags, make_head_work, take_turns
from launch.bench.process import side

__all__ = ["flags", "measure"]


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets both score in turns, and weighs what the heads keep."""
    rows = []
    for model in [args.model] if args.model else MEASURED:
        row = {"model": model}
        for part, count in (("head", 100), ("step", args.reps)):
            flags = {"model": model, "rows": args.rows, "stack": args.stack}
            both = [side("lm", part, scores=kind, **flags) for kind in ("restricted", "full")]
            pair = take_turns(args, *both, count)
            row |= {f"{part} {name}": pair[name] for name in ("first s", "second s", "ratio s")}
        for kind in ("restricted", "full"):
            settings = vars(args) | {"model": model, "scores": kind}
            score, arguments = make_head_work(argparse.Namespace(**settings))
            memory = score.lower(*arguments).compile().memory_analysis()
            row[f"head {kind} temporary bytes"] = memory.temp_size_in_bytes
        rows.append(row)
    return rows
