"""launch/bench: flags of every case, tiny runs of those that need no data, and failures."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from processes import quick_env

from jaxprompt.errors import InputError
from launch.bench import device, lm, process

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch" / "bench"
CASES = sorted(
    path.stem for path in FOLDER.glob("[!_]*.py") if path.stem not in ("models", "process")
)
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def bench(*words: object, timeout: float = 300, **env: str) -> subprocess.CompletedProcess:
    """Runs the runner on one CPU device."""
    return subprocess.run(
        [sys.executable, FOLDER, *map(str, words)], env=os.environ | quick_env() | env,
        capture_output=True, text=True, timeout=timeout,
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


# -- lm -------------------------------------------------------------------------------------------


def test_batches_of_lm_have_lengths():
    args = argparse.Namespace(
        model="gpt2-tiny", kind="soft", rows=2, length=4, input=8, stack="scan", dtype="float32",
        scores=None, still=True,
    )  # fmt: skip
    model = lm.make_model(args)
    batch = lm.make_batch(args, model.prompt)
    columns = 4 + 8 + lm.TARGET - 1
    assert batch.encoder.lengths.tolist() == [columns] * 2 == [batch.encoder.ids.shape[1]] * 2
    _, batch = lm.share_front(model, batch)  # a soft token is left to each row
    assert batch.encoder.lengths.tolist() == [columns - 3] * 2 == [batch.encoder.ids.shape[1]] * 2


# -- device ---------------------------------------------------------------------------------------


# Answers for each case that is named behind the flags.
STAND_IN = """
import json, os, sys, time
for name in [word for word in sys.argv[2:] if not word.startswith("--")]:
    if name == "bert-large-unroll":
        print("out of luck", file=sys.stderr)
        os._exit(9)
    if name == "t5-xl":
        time.sleep(60)
    print("a library prints")
    print(json.dumps({"case": name, "ms": 1.5, "product": str(sys.argv)}), flush=True)
"""


@pytest.fixture
def session(tmp_path, monkeypatch):
    """Starts a session whose processes are stand-ins."""
    words = lambda command, cores: [sys.executable, "-c", STAND_IN, *command[1:]]
    monkeypatch.setattr(device, "pinned", words)

    def start(**settings):
        args = argparse.Namespace(
            output=str(tmp_path / "device.jsonl"), cores="", tiny=True, set=[], product=700.0,
            limit=600.0, case_limit=60.0, cases=[],
        )  # fmt: skip
        vars(args).update(settings)
        return device.Session(args)

    return start


def test_a_device_case_that_ends_the_process_loses_only_itself(session):
    session = session()
    session.run("jax", ["bert-large", "bert-large-unroll", "t5-xl-unroll"])
    rows = [json.loads(line) for line in session.path.read_text().splitlines()]
    assert rows == session.rows
    assert [row["case"] for row in rows] == ["bert-large", "bert-large-unroll", "t5-xl-unroll"]
    assert [row.get("ms") for row in rows] == [1.5, None, 1.5]
    assert rows[1]["error"] == "the process ended with 9: out of luck"
    assert "--product=700.0" in rows[2]["product"]  # also of the process that continues
    table = session.path.with_suffix(".md").read_text()
    assert "failed: the process ended with 9: out of luck" in table


def test_a_device_case_that_exceeds_its_time_is_ended(session):
    session = session(case_limit=0.5)
    session.run("jax", ["t5-xl"])
    assert session.rows == [{"case": "t5-xl", "error": "no result within 0 s", "ended": True}]
    session.end = 0.0
    session.run("torch", ["peft-bert-large"])
    assert session.rows[1]["skipped"] == "the session's 600 s are over"


def test_a_device_case_that_raises_has_an_error():
    args = argparse.Namespace(set=["data.batch=3"], tiny=True)

    def fail(case, args):
        assert case.fields["data.max_len"] == 64 and case.fields["mesh.model"] == 2
        raise MemoryError("4 TB")

    def skip(case, args):
        raise device.SkippedCase("no GPU")

    row = device.guarded("t5-xl-1x2", fail, args)
    assert row["error"] == "MemoryError: 4 TB" and row["kind"] == "train"
    assert device.guarded("product", skip, args)["skipped"] == "no GPU"
    with pytest.raises(InputError, match="data.batch"):
        device.check_fields(["data.batch"])
    with pytest.raises(InputError, match="t5-xl"):
        device.measure(argparse.Namespace(cases=["t5-xll"]))


def test_shares_and_the_table_of_device(session):
    how = dict(device="NVIDIA H100", dtype="bfloat16", product=791.2)  # of 989
    row = device.make_row([2.0, 0.5, 1.0], 395.6e12, 4096, **how)
    assert (row["ms"], row["tokens/s"]) == (1000.0, 4096.0)
    shares = [row[name] for name in ("needed TFLOP", "share of peak", "share of product")]
    assert shares == pytest.approx([395.6, 0.4, 0.5])
    two = device.make_row([1.0], 395.6e12, 0, **how, count=2)
    assert two["share of product"] == pytest.approx(0.25) and two["tokens/s"] is None
    session = session()
    session.record({"case": "a", "device": "H100", "devices": 1, "jax": "1", "mesh": "1 x 1"} | row)
    assert session.table().splitlines()[-1] == (
        "| a | 1 x 1 |  | 1000.00 | 4,096 | 395.60 | 40.0% | 50.0% |  |  |"
    )
    with pytest.raises(InputError, match="no GPU"):
        session.record({"case": "product", "skipped": "no GPU"})


def test_configs_of_device_cases():
    cases = {(case.config, *case.fields): case for case in device.CASES.values() if case.config}
    for case in cases.values():
        assert device.load_case(case).backbone.dtype == "bfloat16"
    assert {case.library for case in device.CASES.values()} == set(device.SIDES)


def test_arrays_of_device_cases():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = lambda dtype: jax.ShapeDtypeStruct((4, 8), dtype, sharding=sharding)
    shapes = {
        "backbone/layers/mlp/up/bias": leaf("bfloat16"),
        "backbone/layers/mlp/up/kernel/codes": leaf("uint8"),
        "backbone/layers/mlp/up/kernel/scale": [leaf("float16"), leaf("float16")],
        "backbone/layers/norm/scale": [leaf("bfloat16")],
    }
    bias, codes, scales, norms = device.random_arrays(shapes).values()
    assert codes.dtype == "uint8" and len(set(codes.ravel().tolist())) > 8
    assert [float(x.max()) for x in scales] == pytest.approx([2e-4] * 2, rel=1e-3)
    assert norms[0].dtype == "bfloat16" and (norms[0] == 1).all()
    assert 0 < float(abs(bias).max()) < 0.2


# Products of frozen weights with inputs and with gradients, and six of T x S in attention, of which
# causal ones need half. The first layer has no gradient of inputs, the last one few positions.
@pytest.mark.long
@pytest.mark.parametrize(
    "name, layers, tokens, params, attention",
    [
        ("bert-large", 24, 32 * 128, 12 * 1024**2, 128 + 20),
        ("llama-2-7b", 32, 8 * 2048, 4 * 4096**2 + 3 * 4096 * 11008, 2048 / 2),
        ("llama-3.1-8b-16k", 32, 16384, 2.5 * 4096**2 + 3 * 4096 * 14336, 16384 / 2),
    ],
)
def test_flops_that_a_case_of_device_needs(name, layers, tokens, params, attention):
    width = 1024 if name == "bert-large" else 4096
    formula = (layers - 1) * tokens * (4 * params + 12 * attention * width)
    assert device.needed_flops(device.CASES[name], []) == pytest.approx(formula, rel=0.01)


@pytest.mark.long
def test_a_tiny_run_of_device(tmp_path):
    output = tmp_path / "device.jsonl"
    cases = ("bert-large-grid8", "t5-xl-1x2", "llama-2-7b-int8", "peft-bert-large-compiled")
    done = bench("device", *cases, "--tiny", "--case-limit=600", "--limit=1500",
                 f"--output={output}", timeout=1500)  # fmt: skip
    assert done.returncode == 0, done.stdout
    product, *rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert product["case"] == "product" and product["TFLOP/s"] > 0
    assert tuple(row["case"] for row in rows) == cases
    for row in rows:
        assert len(row["every ms"]) == 3 and row["tokens/s"] > 0 and row["compile s"] > 0
        share = row["needed TFLOP"] / (1e-3 * row["ms"] * product["TFLOP/s"])
        devices = 2 if row["mesh"] == "1 x 2" else 1
        assert row["share of product"] == pytest.approx(share / devices)
    grid, mesh, texts, peft = rows
    assert grid["shape"] == "8 x 2 x 64" and mesh["mesh"] == "1 x 2"
    assert texts["shape"].endswith(" + 64") and "loss" not in texts
    assert grid["needed TFLOP"] == pytest.approx(8 * peft["needed TFLOP"])
    assert "| peft-bert-large-compiled | 1 x 1 | 2 x 64 |" in done.stdout


@pytest.mark.long
def test_device_without_a_device_is_one_line(tmp_path):
    output = tmp_path / "device.jsonl"
    done = bench("device", f"--output={output}", **NO_GPU, JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("bench: JAX sees no GPU and no TPU; --tiny tries the cases on the CPU\n")
