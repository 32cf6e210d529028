"""launch/bench: flags of every case, tiny runs of those that need no data, and failures."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import quick_env

from launch.bench import gpu, process

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch" / "bench"
CASES = sorted(
    path.stem for path in FOLDER.glob("[!_]*.py") if path.stem not in ("models", "process")
)
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def bench(*words: object, **env: str) -> subprocess.CompletedProcess:
    """Runs the runner on one CPU device."""
    return subprocess.run(
        [sys.executable, FOLDER, *map(str, words)], env=os.environ | quick_env() | env,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_without_a_case_all_are_listed():
    done = bench()
    assert done.returncode == 2 and f"cases: {', '.join(CASES)}" in done.stderr
    assert bench("stpe").returncode == 2 and len(CASES) > 15


@pytest.mark.long_cases("words2-data folder none")
@pytest.mark.parametrize(
    "words, message",
    [
        (("step", "--output=none/x.json"), "--output=none/x.json is in a folder that does not"),
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
        (
            ("step", "--shape=tiny", "--rows=2", "--kind=soft", "--peft"),
            ("ours s", "PEFT s", "ratio s", "ratio peak GiB"),
        ),
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


def test_summarise():
    rounds = [[{"x": [1.0, 3.0, 2.0], "y": 1}, {"x": [4.0], "y": None}], [{"x": 5.0, "y": 2}] * 2]
    row = process.summarise(rounds, {"ms": "x", "GiB": "y"})
    assert row["ours ms"] == 3.5 and row["PEFT ms"] == 4.5 and row["ratio ms"] == 0.75
    assert row["ours GiB"] == 1.5 and row["PEFT GiB"] is row["ratio GiB"] is None
    assert set(process.summarise([[{"x": 1.0}]], {"ms": "x"})) == {"ours ms"}


# -- gpu ------------------------------------------------------------------------------------------


# A soft prompt of 20 x 32 values or a prefix of 2 layers x 2 x 20 x 32, and a head of 2 x 32 + 2.
@pytest.mark.long
@pytest.mark.parametrize(
    "kind, stack, dropout, backend, trained",
    [("soft", "scan", 0.0, "inductor", 706), ("prefix", "unroll", 0.1, "aot_eager", 2626)],
)
def test_a_dry_run_of_gpu(tmp_path, kind, stack, dropout, backend, trained):
    if backend == "inductor" and not shutil.which("g++"):
        backend = "aot_eager"  # inductor compiles C++ on the CPU, for most of a minute
    output = tmp_path / "rows.json"
    flags = [f"--kinds={kind}", f"--stack={stack}", f"--dropout={dropout}", f"--backend={backend}"]
    done = bench("gpu", f"--output={output}", "--dry-run", *flags, **NO_GPU)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["dry_run"] and result["device"] == "cpu" and result["product TFLOP/s"] > 0
    assert [row["PEFT"] for row in result["rows"]] == ["SDPA", "compiled"]
    for row in result["rows"]:
        settings = {"method": kind, "rows": 2, "stack": stack, "dropout": dropout}
        assert settings.items() <= row.items()
        assert row["every trained"] == [[trained, trained]]
        names = [f"{side} {name}" for side in ("ours", "PEFT") for name in ("ms", "TFLOP/s")]
        assert all(row[name] > 0 for name in names)
        assert row["ratio ms"] == pytest.approx(row["ours ms"] / row["PEFT ms"])
        peak = result["product TFLOP/s"]
        assert row["ours share of peak"] == pytest.approx(row["ours TFLOP/s"] / peak)
        assert row["ours GPU GiB"] is row["ratio GPU GiB"] is None  # a CPU counts none
        ((ours, theirs),) = row["every loss"]
        assert ours == pytest.approx(0.69, abs=0.2) and theirs == pytest.approx(0.69, abs=0.2)
    assert "dry run on the CPU" in done.stdout.splitlines()[0]


@pytest.mark.long
def test_no_gpu_is_one_line(tmp_path):
    output = tmp_path / "rows.json"
    done = bench("gpu", f"--output={output}", **NO_GPU, JAX_PLATFORMS="")
    assert (done.returncode, done.stdout) == (2, "") and not output.exists()
    assert done.stderr == "no GPU for both: jax False, torch False\n"


def test_a_side_of_gpu_that_fails_is_left_out(monkeypatch, capsys):
    answer = {"ms": [1.0], "loss": 0.7, "trained": 3, "rss_peak_gib": 1.0, "gpu_peak_gib": 2.0}

    def call(command, cores, **env):
        if "--side=find" in command[2]:
            return {"jax": True, "torch": True, "device": "some", "product TFLOP/s": 100.0}
        assert "--shape=large" in command and not env
        if "--compiled" in command:
            raise subprocess.CalledProcessError(1, command)
        return answer

    monkeypatch.setattr(process, "call", call)
    parser = argparse.ArgumentParser()
    for name in ("rounds", "cores"):
        parser.add_argument(f"--{name}", default="")
    gpu.flags(parser)
    result = gpu.measure(parser.parse_args(["--kinds", "soft"]))
    assert result.failed
    captured = capsys.readouterr()
    assert captured.err.count("compiled: exit code 1, left out") == 1
    assert "dry run" not in captured.out
    (row,) = result.rows
    assert row["PEFT"] == "SDPA" and row["ratio GPU GiB"] == 1.0
    assert len(row["every ms"]) == 3
