"""Steps of a prefix on SST-2 with the frozen matrices as floats and as codes of 8 and of 4 bits."""

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path

from launch.bench.models import LENGTH, serve_steps
from launch.bench.process import side, worker

KINDS = ("none", "int8", "int4")


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--data", required=True, help="folder with sst2/, JSON lines")
    parser.add_argument("--backbone", required=True, help="folder, .gguf file or pkg:PACKAGE/FILE")
    parser.add_argument("--parts", type=int, default=7, help="turns")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--count", type=int, default=2000, help="training examples")
    parser.add_argument("--batch", type=int, default=4, help="examples of 64 tokens in a step")
    parser.add_argument("--kind", choices=KINDS, help="of a side")


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets all three take turns."""
    flags = {"backbone": args.backbone, "data": args.data, "count": args.count, "batch": args.batch}
    with ExitStack() as stack:
        sides = [
            stack.enter_context(worker(side("quantized", "serve", kind=k, **flags), args.cores))
            for k in KINDS
        ]
        for run in sides:
            run(1)
        turns = [[run(args.steps) for run in sides] for _ in range(args.parts)]
    rows = []
    for number, kind in enumerate(KINDS):
        seconds = [turn[number]["seconds"] for turn in turns]
        ratios = [turn[number]["seconds"] / turn[0]["seconds"] for turn in turns]
        last = turns[-1][number]
        rows.append({
            "backbone.quantize": kind, "frozen MB": last["MB"],
            "step ms": 1e3 * statistics.median(seconds) / args.steps,
            "time ratio": statistics.median(ratios), "peak GiB": last["rss_peak_gib"],
            "ratios": ratios,
        })  # fmt: skip
    return rows


def serve(args: argparse.Namespace) -> None:
    """Answers each count of steps with the seconds, and the bytes of what is frozen."""
    import jax

    from configs import base
    from configs.parts import methods, tasks
    from jaxprompt.config.load import to_run_config

    c = base.get_config()
    c.backbone.path, c.backbone.quantize = args.backbone, args.kind
    tasks.sst2(c)
    methods.prefix(c, length=LENGTH)
    c.data.max_len, c.data.batch = 64, args.batch
    c.data.source, c.data.multiple = str(Path(args.data) / "sst2"), c.data.max_len

    def facts(weights, _):
        return {"MB": 1e-6 * sum(leaf.nbytes for leaf in jax.tree.leaves(weights.frozen))}

    serve_steps(to_run_config(c), args.count, facts)


SIDES = {"serve": serve}
