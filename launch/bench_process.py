"""How launch/bench.py starts the processes that it measures, and reports on them."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path


def environment(cores: str) -> dict[str, str]:
    """Makes the environment of a process that runs on `cores` ("0,1") and downloads nothing."""
    own = {"OMP_NUM_THREADS": str(len(cores.split(","))), "HF_HUB_OFFLINE": "1"}
    return os.environ | own | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def call(command: list[str], cores: str) -> dict:
    """Runs a command on `cores`. Returns the JSON object in the last line of its output."""
    done = subprocess.run(
        ["taskset", "-c", cores, sys.executable, *command],
        env=environment(cores), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def worker(command: list[str], cores: str):
    """Starts a process that measures on demand. Yields ask(count) -> its next JSON object."""
    process = subprocess.Popen(
        ["taskset", "-c", cores, sys.executable, *command],
        env=environment(cores), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def ask(count: int) -> dict:
        print(count, file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    with process:
        yield ask
        process.stdin.close()


def report(args: argparse.Namespace, rows: list[dict]) -> None:
    """Prints rows of one kind as a Markdown table and writes them as JSON."""
    show = lambda value: f"{value:.3f}" if isinstance(value, float) else str(value)
    names = [name for name in rows[0] if not isinstance(rows[0][name], list)]
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(show(row[name]) for name in names) + " |")
    load = {"load_average": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0))}
    Path(args.output).write_text(json.dumps({"rows": rows, **load}, indent=2) + "\n")
