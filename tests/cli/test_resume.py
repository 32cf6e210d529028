"""A run that is cut off and resumed ends as one that was not, bit for bit."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from processes import PYTHON_PATH
from tiny_run import (
    DROPS,
    LAYERS,
    WIDTH,
    jaxprompt,
    losses,
    make_config,
    read_lines,
    succeed,
    timeless,
)

from jaxprompt.training import checkpoint, loop
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_folders import checkpoint_folder, find_checkpoint

STEPS = 8
PROMPT, HEAD = LAYERS * 2 * 4 * WIDTH, (WIDTH + 1) * 3
# Step, place in the run, and which step the resumed run must go on from (None: from the start).
MOMENTS = {
    "result-0": STEPS,
    # Where the best parameters are saved more often than the state.
    "saved-2 --config.train.save_steps=3": None,
    "saving-4 --config.train.save_steps=3": 3,
}


@pytest.fixture(scope="module")
def config(dropping, data, tmp_path_factory):
    """A run in groups of batches, with dropout, whose best on dev is improved several times."""
    config = make_config(
        dropping, data, "prefix", train__total_steps=STEPS, train__eval_steps=2,
        train__log_steps=1, optim__lr=1e-2, data__batch=6, **DROPS,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("config") / "tiny.json"
    path.write_text(config.to_json())
    return path


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The workdir of a run that nothing disturbs."""
    from jaxprompt.__main__ import main

    workdir = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", f"--config={config}", f"--workdir={workdir}"]) == 0
    return workdir


@pytest.fixture(scope="module", params=MOMENTS)
def killed(request, config, tmp_path_factory):
    """A run that was killed at a moment: (moment, workdir, the command's words)."""
    workdir = tmp_path_factory.mktemp("killed") / "run"
    script = Path(__file__).with_name("killed.py")
    moment, *words = request.param.split()
    train = ["train", f"--config={config}", f"--workdir={workdir}", *words]
    done = subprocess.run(
        [sys.executable, str(script), *moment.split("-"), *train], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": PYTHON_PATH}, timeout=300,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    return request.param, workdir, train


def arrays(workdir: Path, item: str = "state") -> tuple[dict[str, np.ndarray], dict]:
    """Reads the newest state, or best, whatever is in it. -> (arrays by name, position)"""
    path = find_checkpoint(checkpoint_folder(workdir), item, None)
    saved = checkpoint.handlers()[item].metadata(path / item).tree
    template = {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for n, leaf in saved.items()}
    tree, position = checkpoint._restore(path, item, template)
    return {name: np.asarray(leaf) for name, leaf in tree.items()}, position


def assert_same_end(workdir: Path, whole: Path) -> None:
    """Compares the final state, the best prompt, the metrics and the result."""
    for item in ("state", "best"):
        arrays_of_run, position = arrays(workdir, item)
        expected, expected_position = arrays(whole, item)
        assert arrays_of_run.keys() == expected.keys()
        assert position | {"seconds": 0} == expected_position | {"seconds": 0}
        for name, leaf in expected.items():
            assert arrays_of_run[name].dtype == leaf.dtype
            assert arrays_of_run[name].tobytes() == leaf.tobytes(), name
    lines, right = (read_lines(folder / "metrics.jsonl") for folder in (workdir, whole))
    assert list(map(timeless, lines)) == list(map(timeless, right))
    results = (json.loads((f / "result.json").read_text()) for f in (workdir, whole))
    actual, expected = map(timeless, results)
    assert actual == expected


@pytest.mark.default_cases("saving-4 *")
def test_a_killed_run_resumes_bit_for_bit(killed, whole, capsys):
    moment, workdir, train = killed
    assert not (workdir / "result.json").exists()
    code, out, err = jaxprompt(capsys, *train)
    start = (
        "starting at step 0" if MOMENTS[moment] is None else f"resumed at step {MOMENTS[moment]}"
    )
    assert code == 0 and f"{STEPS} steps, {start}" in err
    assert json.loads(out) == json.loads((workdir / "result.json").read_text())
    assert_same_end(workdir, whole)
    left = [path.name for path in (workdir / "checkpoints").glob("**/[0-9]*.*")]
    assert not left, "a killed save left its folder behind"


def stop_at(patch, step, number):
    """Lets a run send itself a signal after a step."""
    from jaxprompt.training.log import RunLog

    progress = RunLog.progress

    def progress_then_signal(self, at):
        progress(self, at)
        if at == step:
            os.kill(os.getpid(), number)

    patch.setattr(RunLog, "progress", progress_then_signal)


def test_a_signal_saves_and_the_same_command_resumes(whole, config, tmp_path, capsys, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        hours = itertools.count(0, 3600)
        patch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(hours)))
        code, out, err = jaxprompt(capsys, "train", f"--config={config}", f"--workdir={tmp_path}")
    assert code == 130 and out == ""
    assert err.splitlines()[-1].startswith("stopped by Ctrl-C at step 3; saved, run the same")
    assert signal.getsignal(signal.SIGINT) == before
    assert Checkpoints(tmp_path).latest() == 3 and not (tmp_path / "result.json").exists()
    taken = Checkpoints(tmp_path).position()["seconds"]
    # The config that the run saved is as good as the one that it was started with.
    saved = tmp_path / "config.json"
    _, err = succeed(capsys, "train", f"--config={saved}", f"--workdir={tmp_path}")
    assert "resumed at step 3" in err
    assert_same_end(tmp_path, whole)
    assert 3600 < taken < json.loads((tmp_path / "result.json").read_text())["time"]["seconds"]


@pytest.mark.long
def test_a_run_resumes_with_layers_in_another_layout(whole, config, tmp_path, capsys, monkeypatch):
    """Separate layers for three steps, then a scan; evaluated with separate layers."""
    train = ["train", f"--config={config}", f"--workdir={tmp_path}"]
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGTERM)
        _, _, err = jaxprompt(capsys, *train, "--config.backbone.stack=unroll")
    assert "layers are separate arrays and unrolled" in err
    _, err = succeed(capsys, *train, "--config.backbone.stack=scan")
    assert "resumed at step 3" in err and "separate arrays" not in err
    state, expected = arrays(tmp_path)[0], arrays(whole)[0]
    for name, leaf in expected.items():
        if np.issubdtype(leaf.dtype, np.floating):
            assert np.linalg.norm(state[name] - leaf) <= 1e-5 * np.linalg.norm(leaf), name
    evaluate = ["evaluate", f"--config={config}", f"--workdir={tmp_path}", "--split=dev"]
    one, other = (
        json.loads(succeed(capsys, *evaluate, f"--config.backbone.stack={stack}")[0])
        for stack in ("scan", "unroll")
    )
    assert timeless(one) == timeless(other)


@pytest.mark.long
def test_the_own_generator_of_a_device_resumes_bit_for_bit_too(
    whole, config, tmp_path, capsys, monkeypatch
):
    train = ["train", f"--config={config}", "--config.rng=rbg"]
    assert jaxprompt(capsys, *train, f"--workdir={tmp_path / 'whole'}")[0] == 0
    cut = [*train, f"--workdir={tmp_path / 'cut'}"]
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGTERM)
        assert jaxprompt(capsys, *cut)[0] == 0
    _, err = succeed(capsys, *cut)
    assert "resumed at step 3" in err
    assert_same_end(tmp_path / "cut", tmp_path / "whole")
    assert losses(whole) != losses(tmp_path / "whole"), "the generator is that of the config"


def test_a_finished_run_is_not_trained_again(whole, config, capsys, monkeypatch):
    def forbid(*_args, **_kwargs):
        raise AssertionError("trained again")

    times = lambda: {
        p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file() and p.name != "lock"
    }
    before = times()
    monkeypatch.setattr("jaxprompt.training.steps.make_train_step", forbid)
    out, err = succeed(capsys, "train", f"--config={config}", f"--workdir={whole}")
    assert "already trained" in err and str(whole) in err
    assert json.loads(out) == json.loads((whole / "result.json").read_text())
    assert times() == before


def test_a_checkpoint_holds_what_trains_and_no_weight_of_the_backbone(whole):
    state, position = arrays(whole)
    numbers = PROMPT + HEAD
    trained = {name: leaf for name, leaf in state.items() if name.startswith("trainable/")}
    assert {name: leaf.size for name, leaf in trained.items()} == {
        "trainable/prompt/table": PROMPT,
        "trainable/head/main/out/kernel": WIDTH * 3,
        "trainable/head/main/out/bias": 3,
    }
    # Adam's two moments, and scalars: counters, rates, the run's key.
    moments = sum(leaf.nbytes for name, leaf in state.items() if "opt_state" in name)
    assert 0 <= moments - 2 * 4 * numbers <= 100
    rest = [n for n in state if not n.startswith(("trainable/", "opt_state/"))]
    assert sorted(rest) == ["key", "skipped", "step", "streak"]
    places = {"best", "since", "done", "error", "steps", "skipped", "data", "seconds"}
    assert set(position) == places
    # On disk three times the prompt and 25 to 33 KiB of orbax's own, by how many writes go into one
    # file; the backbone has 92 KiB.
    files = (whole / f"checkpoints/{STEPS}/state").rglob("*")
    size = sum(file.stat().st_size for file in files if file.is_file())
    assert 3 * 4 * numbers < size < 3 * 4 * numbers + 64 * 1024
    best, position = arrays(whole, "best")
    assert sum(leaf.nbytes for leaf in best.values()) == 4 * numbers
    assert set(position["best"]) == {"step", "value", "dev"}
    # The learning rate of each loss, from 1e-2 to 0 along a line.
    rates = [x["lr"] for x in read_lines(whole / "metrics.jsonl") if "loss" in x]
    assert rates == pytest.approx([1e-2 * (1 - step / STEPS) for step in range(STEPS)], rel=1e-5)
