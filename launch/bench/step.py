"""Seconds and memory of a step of BERT-base, 16 x 128 tokens, float32, beside PEFT's.

PEFT's side is a script that takes --kind PT|PX, --virtual, --reps and --threads and prints JSON
with `wall_s` and `rss_peak_gib`; without --peft-script only ours is timed.
"""

import argparse
import json
import os
import statistics

from launch.bench.models import LENGTH, SHAPES, make_model, make_work, peak_gib, time_steps
from launch.bench.process import call, side, summarise


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--peft-script", default="")
    parser.add_argument("--kind", choices=("soft", "prefix"), help="one alone")
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--stack", default="scan")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--reps", type=int, default=3)


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets ours and PEFT's take turns."""
    rows = []
    threads = len(args.cores.split(",")) if args.cores else len(os.sched_getaffinity(0))
    for kind in [args.kind] if args.kind else ("soft", "prefix"):
        flags = {name: getattr(args, name) for name in ("shape", "stack", "dtype", "rows", "reps")}
        commands = [side("step", "ours", kind=kind, **flags)]
        if args.peft_script:
            words = ["--kind", {"soft": "PT", "prefix": "PX"}[kind], "--virtual", str(LENGTH)]
            words += ["--reps", str(args.reps), "--threads", str(threads)]
            commands.append([args.peft_script, *words])
        rounds = [[call(command, args.cores) for command in commands] for _ in range(args.rounds)]
        row = summarise(rounds, {"s": "wall_s", "peak GiB": "rss_peak_gib"})
        times = [[statistics.median(one["wall_s"]) for one in both] for both in rounds]
        peaks = [[one["rss_peak_gib"] for one in both] for both in rounds]
        rows.append({"method": kind, "stack": args.stack} | row | {"times": times, "peaks": peaks})
    return rows


def time_ours(args: argparse.Namespace) -> None:
    """Times our step; prints one JSON object."""
    import jax

    model = make_model(args.shape, args.kind, stack=args.stack, dtype=args.dtype)
    step, (state, frozen, batch) = make_work(model, args.rows)
    now = (state, None)

    def run() -> None:
        nonlocal now
        now = step(now[0], frozen, batch)

    seconds = time_steps(run, lambda: jax.block_until_ready(now), args.reps)
    print(json.dumps({"wall_s": seconds, "rss_peak_gib": peak_gib()}))


SIDES = {"ours": time_ours}
