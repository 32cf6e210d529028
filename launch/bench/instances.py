"""Steps of MiniLM on SST-2 with a prompt that all texts share, and with one of each text's own."""

import argparse
import contextlib
import statistics

from launch.bench.models import LENGTH, minilm_on_sst2, serve_steps
from launch.bench.process import side, worker

ENCODERS = ("cnn", "lstm", "mlp")
BASES = ("prompt", "prefix")
WAYS = ("shared", "random", *ENCODERS)


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--data", required=True, help="folder with sst2/, JSON lines")
    parser.add_argument("--parts", type=int, default=5, help="turns")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--base", choices=BASES, help="of a side")
    parser.add_argument("--way", choices=WAYS, help="of a side")
    parser.add_argument("--count", type=int, help="training examples (all)")


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets all ways of one base take turns."""
    rows = []
    for base in BASES:
        flags = {"base": base, "data": args.data, "count": args.count}
        with contextlib.ExitStack() as stack:
            task_info = {
                way: stack.enter_context(
                    worker(side("instances", "serve", way=way, **flags), args.cores)
                )
                for way in WAYS
            }
            first_answers = {way: ask(2) for way, ask in task_info.items()}
            turns = [
                {way: ask(args.steps) for way, ask in task_info.items()} for _ in range(args.parts)
            ]
        seconds = {way: [turn[way]["seconds"] for turn in turns] for way in WAYS}
        for way in WAYS:
            ratios = (a / b for a, b in zip(seconds[way], seconds["shared"], strict=True))
            rows.append({
                "base": base, "way": way, "trained": first_answers[way]["trained"],
                "ms": 1e3 * statistics.median(seconds[way]) / args.steps,
                "time ratio": statistics.median(ratios), "times": seconds[way],
            })  # fmt: skip
    return rows


def serve(args: argparse.Namespace) -> None:
    """Answers each count of steps with the seconds, and the numbers that train."""
    from configs.parts import methods
    from jaxprompt.config.load import to_run_config

    c = minilm_on_sst2(args.data)
    if args.way == "shared":
        (methods.soft if args.base == "prompt" else methods.prefix)(c, length=LENGTH)
    elif args.way == "random":
        methods.ipt(c, length=LENGTH, on=args.base)
    else:
        methods.ipt_encoder(c, length=LENGTH, on=args.base, encoder=args.way)

    def facts(weights, state):
        return {"trained": sum(leaf.size for leaf in weights.trainable.values())}

    serve_steps(to_run_config(c), args.count, facts)


SIDES = {"serve": serve}
