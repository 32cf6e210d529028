"""Milliseconds of steps of MiniLM on SST-2 with and without the states of frozen layers kept."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from launch.bench.models import LENGTH, open_training, peak_gib
from launch.bench.process import side, worker

CASES = {"upper third": "5-6", "head alone": ""}  # the prefix's layers of MiniLM's six


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--data", required=True, help="folder with sst2/, JSON lines")
    parser.add_argument("--parts", type=int, default=4, help="turns")
    parser.add_argument("--steps", type=int, default=50, help="of a turn")
    parser.add_argument("--case", choices=CASES, help="of a side")
    parser.add_argument("--cache", choices=("off", "host", "disk"), help="of a side")
    parser.add_argument("--rows", type=int, help="of the training split (all)")


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets both take turns."""
    rows = []
    for case in CASES:
        flags = {"case": case, "data": args.data, "rows": args.rows}
        off, host = (side("cache", "serve", cache=where, **flags) for where in ("off", "host"))
        with worker(off, args.cores) as without, worker(host, args.cores) as cached:
            without(2), cached(2)
            pairs = [(without(args.steps), cached(args.steps)) for _ in range(args.parts)]
        (first, second), times = pairs[-1], [[one["seconds"] for one in pair] for pair in pairs]
        each = [statistics.median(column) / args.steps for column in zip(*times, strict=True)]
        rows.append({
            "case": case, "without ms": 1e3 * each[0], "kept ms": 1e3 * each[1],
            "times faster": statistics.median(a / b for a, b in times),
            "products left": second["GFLOP"] / first["GFLOP"],
            "time left": statistics.median(b / a for a, b in times),
            "filling s": second["fill s"], "times": times,
        })  # fmt: skip
    return rows


def make_config(args: argparse.Namespace):
    """Makes the config of a case: SST-2, batches of 32, no dropout in the backbone."""
    from configs import base
    from configs.parts import backbones, methods, tasks
    from jaxprompt.config.load import to_run_config

    c = base.get_config()
    backbones.minilm(c)
    tasks.sst2(c)
    if CASES[args.case]:
        methods.prefix(c, length=LENGTH)
        c.prompt.layers = CASES[args.case]
    else:
        methods.head_only(c)
    c.data.source, c.backbone.dropout = str(Path(args.data) / "sst2"), 0.0
    c.cache.location = "" if args.cache == "off" else args.cache
    return to_run_config(c)


def serve(args: argparse.Namespace) -> None:
    """Answers each count of steps with the seconds, what was kept, and the products of a step."""
    import jax
    import numpy as np

    from jaxprompt import rng
    from jaxprompt.build.task import build_objectives
    from jaxprompt.parallel import sharding
    from jaxprompt.parallel.compilation import jit
    from jaxprompt.parallel.hlo import count_work
    from jaxprompt.training import steps
    from jaxprompt.training.features import cache as feature_cache
    from jaxprompt.training.state import place_state

    c = make_config(args)
    scorer, splits, weights, batches, tx, placement = open_training(c, args.rows)
    per_epoch = batches.steps_per_epoch
    with tempfile.TemporaryDirectory() as folder:
        cache, fill = feature_cache.plan_feature_cache(
            c, scorer, splits, weights, placement, folder
        )
        started = time.perf_counter()
        fill(lambda line: print(line, file=sys.stderr))
        filled = time.perf_counter() - started
    step = steps.make_train_step(cache.model, tx, build_objectives(c, cache.model))
    step = jit(sharding.with_placement(placement, step), donate_argnums=0)
    state = place_state(placement, weights.trainable, tx, rng.key_for(c.seed, "dropout"))
    take = lambda: sharding.put_batch(placement, cache.add_states(splits["train"], next(batches)))
    programs, shape_counts = {}, Counter()

    def program(batch):
        shape = batch.encoder.ids.shape
        if shape not in programs:
            programs[shape] = step.lower(state, weights.frozen, batch).compile()
        return programs[shape]

    for _ in range(per_epoch):
        batch = take()
        program(batch)
        shape_counts[batch.encoder.ids.shape] += 1
    work = {shape: count_work(program.as_text()).flops for shape, program in programs.items()}
    gflop = 1e-9 * float(np.average(list(work.values()), weights=[shape_counts[x] for x in work]))
    facts = {"fill s": filled, "epoch steps": per_epoch, "GFLOP": gflop, "shapes": len(work)}
    for line in sys.stdin:
        started = time.perf_counter()
        for _ in range(int(line)):
            batch = take()
            state, _ = program(batch)(state, weights.frozen, batch)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - started
        print(json.dumps(facts | {"seconds": seconds, "rss_peak_gib": peak_gib()}), flush=True)


SIDES = {"serve": serve}
