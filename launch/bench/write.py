"""Seconds of writing 32 tokens greedily (first) beside transformers' generate (second)."""

import argparse

from launch.bench.lm import flags, take_turns
from launch.bench.process import side

__all__ = ["flags", "measure"]


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets both write in turns."""
    rows = []
    for model in [args.model] if args.model else ("t5-small", "gpt2"):
        for size in (1, 16):
            shape = {"model": model, "rows": size, "dtype": args.dtype}
            ours = side("lm", "write", **shape, kind="none", stack=args.stack)
            pair = take_turns(args, ours, side("lm", "torch-write", **shape), 32)
            rate = {f"{x} tokens/s": 32 * size / pair[f"{x} s"] for x in ("first", "second")}
            rows.append({"model": model, "batch": size, **rate, **pair})
    return rows
