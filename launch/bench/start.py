"""Seconds of the quickstart's training from the command to the record of its first step."""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch.bench.process import pinned

ROOT = Path(__file__).resolve().parents[2]


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds no flags."""


def measure(args: argparse.Namespace) -> list[dict]:
    """Starts it anew in every round."""
    rows = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as workdir:
            command = ["-m", "jaxprompt", "train", f"--config={ROOT}/configs/quickstart.py"]
            command += [f"--workdir={workdir}", "--config.train.log_steps=1"]
            log = Path(workdir) / "metrics.jsonl"
            started = time.perf_counter()
            process = subprocess.Popen(
                pinned(command, args.cores), cwd=ROOT, stderr=subprocess.DEVNULL
            )  # fmt: skip
            while process.poll() is None and not (log.exists() and log.stat().st_size):
                time.sleep(0.01)
            seconds = time.perf_counter() - started
            if process.poll() is not None:
                sys.exit(f"the quickstart ended with code {process.returncode} before a step")
            process.kill()
            process.wait()
        rows.append({"start to first step s": seconds})
    return rows
