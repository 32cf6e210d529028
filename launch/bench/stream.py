"""Peak memory and speed of `predict` by the number of rows of its input.

The rows repeat the texts of a file. Each count is one process per turn, from the command to the
last line of its output; `peak MiB` is the maximum resident set that the system reports.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from launch.bench.process import ROOT, SideEnded, environment, pinned


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this case."""
    parser.add_argument(
        "--prompt", required=True, help="export of a prompt for a task with one text column"
    )
    parser.add_argument(
        "--texts",
        default=str(ROOT / "jaxprompt" / "data" / "topics" / "test.jsonl"),
        help="JSONL file with the texts in its column `text`",
    )
    parser.add_argument(
        "--counts", default="2000,20000,200000", help="numbers of rows, e.g. 2000,2000000"
    )
    parser.add_argument("--words", type=int, help="words of a text (default: all)")
    parser.add_argument("--batch", type=int, default=64, help="rows of a batch")


def measure(args: argparse.Namespace) -> list[dict]:
    """Predicts each number of rows, `rounds` times."""
    task = json.loads(Path(args.prompt, "prompt.json").read_text())["task"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "rows.jsonl"), Path(folder, "answers.jsonl")
        command = ["-m", "jaxprompt", "predict", f"--prompt={args.prompt}", f"--input={source}"]
        command += [f"--output={output}", f"--batch={args.batch}"]
        for count in map(int, args.counts.split(",")):
            with source.open("w") as file:
                texts = itertools.islice(itertools.cycle(_read_texts(args)), count)
                file.writelines(json.dumps({task["fields"][0]: text}) + "\n" for text in texts)
            turns = [_run(command, args.cores) for _ in range(args.rounds)]
            seconds, peaks = zip(*turns, strict=True)
            middle = statistics.median(seconds)
            row = {"rows": count, "seconds": middle, "rows a second": count / middle}
            rows.append(row | {"peak MiB": statistics.median(peaks), "times": list(seconds)})
    return rows


def _read_texts(args: argparse.Namespace) -> Iterator[str]:
    for line in Path(args.texts).read_text("utf-8").splitlines():
        yield " ".join(json.loads(line)["text"].split()[: args.words])


def _run(command: list[str], cores: str) -> tuple[float, float]:
    """Runs a command. Returns its seconds, and its peak memory in MiB."""
    started = time.perf_counter()
    process = subprocess.Popen(
        pinned(command, cores), cwd=ROOT, env=environment(cores), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    messages = process.stderr.read()
    # For the resources of this child alone.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SideEnded(f"predict ended with {process.returncode}: {messages.strip()}")
    return time.perf_counter() - started, usage.ru_maxrss / 1024
