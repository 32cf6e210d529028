"""launch/bench: flags of every case, and tiny runs of those that need no data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import quick_env

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch" / "bench"
CASES = sorted(
    path.stem for path in FOLDER.glob("[!_]*.py") if path.stem not in ("models", "process")
)


def bench(*words: str) -> subprocess.CompletedProcess:
    """Runs the runner on one CPU device."""
    return subprocess.run(
        [sys.executable, FOLDER, *words], env=os.environ | quick_env(), capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip


def test_without_a_case_all_are_listed():
    done = bench()
    assert done.returncode == 2 and f"cases: {', '.join(CASES)}" in done.stderr
    assert bench("stpe").returncode == 2 and len(CASES) > 15


@pytest.mark.long_cases("words2-data folder none")
@pytest.mark.parametrize(
    "words, message",
    [
        (("step", "--output=none/x.json"), "--output=none/x.json stands in a folder that does not"),
        (("step", "--output=x.json", "--rounds=0"), "--rounds=0 must be at least 1"),
        (("epoch", "--output=x.json", "--data=none"), "data folder none"),
    ],
)
def test_bad_input_is_one_line(words, message):
    done = bench(*words)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_every_case_has_flags_and_imports_no_jax():
    code = "\n".join((
        "import argparse, importlib, sys",
        f"sys.path.insert(0, {str(ROOT)!r})",
        f"for name in {CASES!r}:",
        "    case = importlib.import_module(f'launch.bench.{name}')",
        "    assert case.__doc__ and callable(case.measure), name",
        "    case.flags(argparse.ArgumentParser())",
        "assert not {'jax', 'torch'} & set(sys.modules)",
    ))  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.long
@pytest.mark.parametrize(
    "words, fields",
    [
        (("step", "--shape=tiny", "--rows=2", "--kind=soft"), ("ours s", "ours peak GiB")),
        (("scores", "--model=gpt2-tiny", "--rows=2"), ("head ratio s", "step ratio s")),
        (("load", "--layers=1", "--tiny"), ("share GB", "peak GB")),
    ],
)
def test_tiny_runs(words, fields, tmp_path):
    output = tmp_path / "rows.json"
    one = ("--reps=1",) * (words[0] != "load")
    done = bench(*words, *one, "--rounds=1", f"--output={output}")
    assert done.returncode == 0, done.stderr
    for row in json.loads(output.read_text())["rows"]:
        assert all(row[field] > 0 for field in fields), row
    assert done.stdout.startswith("| ") and fields[0] in done.stdout
