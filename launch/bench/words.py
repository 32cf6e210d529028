"""Steps of MiniLM on SST-2 with a prompt row per word: of the words seen, and of the vocabulary."""

import argparse
import statistics

from launch.bench.models import LENGTH, minilm_on_sst2, serve_steps
from launch.bench.process import side, worker

BASES = ("prompt", "prefix")


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--data", required=True, help="folder with sst2/, JSON lines")
    parser.add_argument("--parts", type=int, default=4, help="turns")
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--base", choices=BASES, help="of a side")
    parser.add_argument("--stored", choices=("seen", "all"), help="of a side")
    parser.add_argument("--count", type=int, help="training examples (all)")


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets both take turns."""
    rows = []
    for base in BASES:
        flags = {"base": base, "data": args.data, "count": args.count}
        some, all_words = (
            side("words", "serve", stored=which, **flags) for which in ("seen", "all")
        )
        with worker(some, args.cores) as few, worker(all_words, args.cores) as all_of_them:
            few(2), all_of_them(2)
            pairs = [(few(args.steps), all_of_them(args.steps)) for _ in range(args.parts)]
        (first, second), times = pairs[-1], [[one["seconds"] for one in pair] for pair in pairs]
        each = [statistics.median(column) / args.steps for column in zip(*times, strict=True)]
        rows.append({
            "base": base, "words seen": first["words"], "of": second["words"],
            "seen ms": 1e3 * each[0], "all ms": 1e3 * each[1],
            "time ratio": statistics.median(a / b for a, b in times),
            "seen state MB": first["MB"], "all state MB": second["MB"],
            "seen peak GiB": first["rss_peak_gib"], "all peak GiB": second["rss_peak_gib"],
            "times": times,
        })  # fmt: skip
    return rows


def serve(args: argparse.Namespace) -> None:
    """Answers each count of steps with the seconds, and the bytes of what trains."""
    import jax

    from configs.parts import methods
    from jaxprompt.config.load import to_run_config

    c = minilm_on_sst2(args.data)
    methods.ipt(c, length=LENGTH, on=args.base, rows=args.stored)

    def facts(weights, state):
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        return {"words": len(weights.trainable["prompt/words/table"]), "MB": 1e-6 * state_bytes}

    serve_steps(to_run_config(c), args.count, facts)


SIDES = {"serve": serve}
