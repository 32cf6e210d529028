"""Seconds that a step at BERT-large shape takes to trace and to compile, from abstract arrays."""

import argparse
import time

from launch.bench.models import SHAPES, make_model, make_work


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--shape", choices=SHAPES, default="large")


def measure(args: argparse.Namespace) -> list[dict]:
    """Compiles both methods under scan and unrolled."""
    rows = []
    for kind in ("soft", "prefix"):
        for stack in ("scan", "unroll"):
            step, arguments = make_work(
                make_model(args.shape, kind, stack=stack), 16, abstract=True
            )
            started = time.perf_counter()
            lowered = step.lower(*arguments)
            traced = time.perf_counter()
            lowered.compile()
            done = time.perf_counter()
            times = {"trace s": traced - started, "compile s": done - traced}
            rows.append({"method": kind, "stack": stack, **times, "total s": done - started})
    return rows
