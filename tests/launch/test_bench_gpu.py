"""launch/bench gpu: dry runs on the CPU, and failures."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import quick_env

ROOT = Path(__file__).resolve().parents[2]
NONE = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def bench(output: Path, *flags: str, **env: str) -> tuple[int, str, str]:
    """Runs the command. -> (exit code, stdout, stderr)"""
    words = [ROOT / "launch" / "bench", "gpu", f"--output={output}", *flags]
    env = os.environ | quick_env() | NONE | env
    done = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


SIDES = ("ours", "PEFT")


# A soft prompt of 20 x 32 numbers or a prefix of 2 layers x 2 x 20 x 32, and a head of 2 x 32 + 2.
@pytest.mark.long
@pytest.mark.parametrize(
    "kind, stack, dropout, backend, trained",
    [("soft", "scan", 0.0, "inductor", 706), ("prefix", "unroll", 0.1, "aot_eager", 2626)],
)
def test_a_dry_run_takes_every_path(tmp_path, kind, stack, dropout, backend, trained):
    if backend == "inductor" and not shutil.which("g++"):
        backend = "aot_eager"  # inductor compiles C++ on the CPU, for most of a minute
    flags = [f"--kinds={kind}", f"--stack={stack}", f"--dropout={dropout}", f"--backend={backend}"]
    code, out, err = bench(tmp_path / "rows.json", "--dry-run", *flags)
    assert code == 0, err
    result = json.loads((tmp_path / "rows.json").read_text())
    assert result["dry_run"] and result["device"] == "cpu" and result["product TFLOP/s"] > 0
    assert [row["PEFT"] for row in result["rows"]] == ["SDPA", "compiled"]
    for row in result["rows"]:
        settings = {"method": kind, "rows": 2, "stack": stack, "dropout": dropout}
        assert settings.items() <= row.items()
        assert row["every trained"] == [[trained, trained]]
        assert all(row[f"{side} {name}"] > 0 for side in SIDES for name in ("ms", "TFLOP/s"))
        assert row["ratio ms"] == pytest.approx(row["ours ms"] / row["PEFT ms"])
        peak = result["product TFLOP/s"]
        assert row["ours share of peak"] == pytest.approx(row["ours TFLOP/s"] / peak)
        assert row["ours GPU GiB"] is row["ratio GPU GiB"] is None  # a CPU counts none
        ((ours, theirs),) = row["every loss"]
        assert ours == pytest.approx(0.69, abs=0.2) and theirs == pytest.approx(0.69, abs=0.2)
    lines = out.splitlines()
    assert "dry run on the CPU" in lines[0] and "mean nothing" in lines[0]
    assert lines[1].startswith("| method | PEFT |") and len(lines) == 3 + 2


@pytest.mark.long
def test_no_gpu_is_one_line(tmp_path):
    code, out, err = bench(tmp_path / "rows.json", JAX_PLATFORMS="")
    assert code == 2 and out == "" and not (tmp_path / "rows.json").exists()
    assert err == "no GPU for both: jax False, torch False\n"


def test_summarise(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from launch.bench.process import summarise

    rounds = [[{"x": [1.0, 3.0, 2.0], "y": 1}, {"x": [4.0], "y": None}], [{"x": 5.0, "y": 2}] * 2]
    row = summarise(rounds, {"ms": "x", "GiB": "y"})
    assert row["ours ms"] == 3.5 and row["PEFT ms"] == 4.5 and row["ratio ms"] == 0.75
    assert row["ours GiB"] == 1.5 and row["PEFT GiB"] is row["ratio GiB"] is None
    assert set(summarise([[{"x": 1.0}]], {"ms": "x"})) == {"ours ms"}


def test_a_side_that_fails_is_left_out(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT))
    from launch.bench import gpu, process

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
