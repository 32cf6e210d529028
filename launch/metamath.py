"""Repeats a run of PEFT's benchmark: prepares MetaMathQA and GSM8K, then trains and tests.

usage: python launch/metamath.py --workdir DIR [--method METHOD] [--data DIR] [--config.X=Y ...]

--method is one of configs/metamath.py, by default prefix_text; other flags are those of `python -m
jaxprompt train`. --data (default DATA/metamath) gets train.jsonl, the rows that PEFT trains on,
dev.jsonl, the rows of GSM8K's training set that PEFT validates on, and test.jsonl, GSM8K's test
set. If train.jsonl exists, nothing is downloaded.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from configs.metamath import METHODS
from jaxprompt.__main__ import main as jaxprompt
from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.splits import read_split
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.errors import InputError, check_known
from jaxprompt.files import make_folder, write_atomic

# method_comparison/MetaMathQA of PEFT, data.py and utils.py
MAX_CHARACTERS = 1300  # of a question and its response
TRAINED = 20_000  # rows of 5,000 steps of 4; its batches follow the order of the data set
VALIDATED = 50

METAMATH = custom_task(fields=("query",), target="response")
GSM8K = custom_task(fields=("question",), target="answer")


def training_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of MetaMathQA that are short enough."""
    for row in rows:
        if len(f"{row['query']} {row['response']}") <= MAX_CHARACTERS:
            yield row


def renamed(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields rows of GSM8K in the columns of MetaMathQA."""
    for row in rows:
        yield {"query": row["question"], "response": row["answer"]}


def validation_rows(rows: Rows) -> Rows:
    """Returns the rows that PEFT's seed 0 selects."""
    order = np.arange(len(rows))
    np.random.RandomState(0).shuffle(order)
    return rows.select(order[:VALIDATED].tolist())


def write_data(folder: Path) -> None:
    """Downloads both data sets and writes the splits; train comes last."""

    def write(split: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = (json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        write_atomic(folder / f"{split}.jsonl", "".join(lines).encode())

    gsm8k = {x: read_split(GSM8K, x, source="hub:openai/gsm8k:main") for x in ("train", "test")}
    metamath = read_split(METAMATH, "train", source="hub:meta-math/MetaMathQA")
    make_folder(folder)
    write("test", renamed(gsm8k["test"]))
    write("dev", renamed(validation_rows(gsm8k["train"])))
    write("train", itertools.islice(training_rows(metamath), TRAINED))


def main() -> int:
    """Prepares the data and trains. Returns the exit code of `train`."""
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--method", default="prefix_text")
    parser.add_argument("--data", default="DATA/metamath")
    args, flags = parser.parse_known_args()
    check_known("--method", args.method, METHODS)
    if not (Path(args.data) / "train.jsonl").exists():
        write_data(Path(args.data))
    config = Path(__file__).parents[1] / "configs/metamath.py"
    words = [f"--config={config}:{args.method}", f"--config.data.source={args.data}"]
    return jaxprompt(["train", *words, f"--workdir={args.workdir}", *flags])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"metamath: {error}", file=sys.stderr)
        sys.exit(2)
