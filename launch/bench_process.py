"""How launch/bench.py starts the processes that it measures."""

import contextlib
import json
import os
import subprocess
import sys


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
