"""Seconds and memory of a step of BERT-base, 16 x 128 tokens, float32, beside PEFT's.

Both have 20 soft tokens or a prefix of 20, a dropout of 0.1, and AdamW. Without --peft only ours is
timed.
"""

import argparse
import json
import os
import statistics

from launch.bench.models import SHAPES, make_model, make_peft, make_work, peak_gib, time_steps
from launch.bench.process import call, side, summarise


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--peft", action="store_true", help="time PEFT's step too")
    parser.add_argument("--kind", choices=("soft", "prefix"), help="one alone")
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--stack", default="scan")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--reps", type=int, default=3)


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets ours and PEFT's take turns."""
    rows = []
    for kind in [args.kind] if args.kind else ("soft", "prefix"):
        flags = {name: getattr(args, name) for name in ("shape", "stack", "dtype", "rows", "reps")}
        names = ("ours", "peft") if args.peft else ("ours",)
        commands = [side("step", name, kind=kind, **flags) for name in names]
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


def time_peft(args: argparse.Namespace) -> None:
    """Times PEFT's step; prints one JSON object."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = make_peft(args.shape, args.kind, dtype=args.dtype)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.0)
    ids = torch.randint(5, 30522, (args.rows, 128))
    labels = torch.randint(0, 2, (args.rows,))

    def run() -> None:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = time_steps(run, lambda: None, args.reps)
    print(json.dumps({"wall_s": seconds, "rss_peak_gib": peak_gib()}))


SIDES = {"ours": time_ours, "peft": time_peft}
