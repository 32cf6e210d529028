"""How the sides of a case are started, asked and reported on."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RUNNER = str(ROOT / "launch" / "bench")


class SideEnded(Exception):
    """A process of a side ended before it answered; what it wrote says why."""


class Result(NamedTuple):
    """What a case has measured."""

    rows: list[dict]  # of the table
    facts: dict[str, Any] = {}  # noqa: RUF012 (nobody changes them)
    failed: bool = False  # a side was left out


def side(case: str, name: str, /, **flags: Any) -> list[str]:
    """Makes the command of a side of a case; a flag that is True stands alone, None is none."""
    words = [RUNNER, case, f"--side={name}"]
    for flag, value in flags.items():
        if value is True:
            words.append(f"--{flag}")
        elif value is not None and value is not False:
            words.append(f"--{flag}={value}")
    return words


def environment(cores: str) -> dict[str, str]:
    """Makes the environment of a process that runs on `cores` ("0,1") and downloads nothing.

    No cores are all that this process may use. JAX takes of a GPU what it needs and no more, so
    that torch finds memory beside it.
    """
    number = len(cores.split(",") if cores else os.sched_getaffinity(0))
    variables = {"OMP_NUM_THREADS": str(number), "HF_HUB_OFFLINE": "1"}
    # Sides import this checkout too where `python -m launch.bench` was called beside it.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    return os.environ | variables | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def pinned(command: list[str], cores: str) -> list[str]:
    """Makes the words that run a Python command on `cores`."""
    return [*(["taskset", "-c", cores] if cores else []), sys.executable, *command]


def call(command: list[str], cores: str, **env: str) -> dict:
    """Runs a command on `cores`. Returns the JSON object in the last line of its output."""
    done = subprocess.run(
        pinned(command, cores),
        env=environment(cores) | env, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def worker(command: list[str], cores: str):
    """Starts a process that measures on demand. Yields ask(count) -> its next JSON object."""
    process = subprocess.Popen(
        pinned(command, cores),
        env=environment(cores), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def ask(count: int) -> dict:
        with contextlib.suppress(BrokenPipeError):  # read below: it has said why
            print(count, file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            raise SideEnded(f"{' '.join(command[1:])} ended with {process.wait()}")
        return json.loads(line)

    with process:
        yield ask
        process.stdin.close()


def summarise(rounds: list[list[dict]], fields: dict[str, str]) -> dict:
    """Returns medians of ours (and PEFT's) over rounds, and of each round's ratio ours / PEFT's.

    `fields` are what the answers hold of each name. Where an answer is None, so is what it makes.
    """
    row = {}
    for name, field in fields.items():
        answers = [[_middle(side[field]) for side in sides] for sides in rounds]
        for side, values in zip(("ours", "PEFT"), zip(*answers, strict=True), strict=False):
            row[f"{side} {name}"] = _middle(values)
        if len(rounds[0]) == 2:
            row[f"ratio {name}"] = _middle([a and b and a / b for a, b in answers])
    return row


def _middle(value):
    values = value if isinstance(value, list | tuple) else [value]
    return None if None in values else statistics.median(values)


def report(output: str, rows: list[dict], **facts: Any) -> None:
    """Prints rows of one kind as a Markdown table and writes them and `facts` as JSON."""
    show = lambda value: f"{value:.3f}" if isinstance(value, float) else str(value)
    names = [name for name in rows[0] if not isinstance(rows[0][name], list)]
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(show(row[name]) for name in names) + " |")
    load = {"load_average": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0))}
    Path(output).write_text(json.dumps({"rows": rows, **facts, **load}, indent=2) + "\n")
