"""How the runs of a grid end: each by its own best step, and by what it chose on dev there."""

import contextlib
import json
import shutil
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxprompt.config.load import load_config
from jaxprompt.errors import InputError
from jaxprompt.runs.grid import batched_runs, runner
from jaxprompt.runs.grid.batched_runs import BatchedRuns, Chunk, GroupStart
from jaxprompt.runs.grid.expand import GridRun
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_writer import CheckpointWriter
from jaxprompt.training.progress import Evaluation, Progress


def make_member(folder, seed):
    folder.mkdir()
    config = load_config("base:soft", [("seed", seed)])
    run = SimpleNamespace(folder=folder, config=config)
    return SimpleNamespace(run=run, plan=None)


def test_each_run_is_tested_with_its_own_numbers_and_its_own_threshold(tmp_path, monkeypatch):
    """Of three runs the second failed: the third is neither tested as it nor with its dev."""
    members = [make_member(tmp_path / f"run{i}", i) for i in range(3)]
    devs = [{"f1": 0.25 * i, "threshold": i + 0.5} for i in range(3)]
    progress = [Progress(best=Evaluation(10 + i, 0.0, devs[i]), steps=20) for i in range(3)]
    progress[1].error = "3 steps in a row were not finite"
    calls = []

    def score(split, rows, trainable, per_run, devs):
        calls.append((split, rows, trainable, per_run, devs))
        return [{"f1": dev["threshold"]} for dev in devs]

    restore = lambda folder: lambda template, step: (f"numbers of {folder.name} at {step}", None)
    saved = lambda folder: SimpleNamespace(restore_best=restore(folder))
    monkeypatch.setattr(batched_runs, "Checkpoints", saved)
    scorer = SimpleNamespace(has=lambda split: True, score=score)
    train = SimpleNamespace(test=True, log_steps=1)
    shared = SimpleNamespace(
        config=SimpleNamespace(train=train), pretrains=False, make_scorer=lambda *_: scorer
    )
    programs = SimpleNamespace(
        one_trainable=dict, put_per_run=list, stack_trainable=list, compiled=[1], frozen={}
    )
    per_run = [SimpleNamespace(name=i, frozen={}) for i in range(3)]
    start = GroupStart([], None, None, [0, 1, 2], progress, 20, 0.0)
    chunk = Chunk(shared, members, programs, per_run)
    log = SimpleNamespace(activity=lambda text: contextlib.nullcontext())
    runs = BatchedRuns(chunk, start, checkpoints=None, logs=[], log=log, stop_signal=None)
    runs.end(seconds=9.0)
    best = ["numbers of run0 at 10", "numbers of run2 at 12"]
    assert calls == [("test", [0, 2], best, [per_run[0], per_run[2]], [devs[0], devs[2]])]
    for i in (0, 2):
        result = json.loads((tmp_path / f"run{i}/result.json").read_text())
        assert result["test"] == {"f1": i + 0.5} and result["dev"] == devs[i]
        assert (result["best_step"], result["seed"]) == (10 + i, i)
        assert result["time"] == {"seconds": 3.0, "step_programs": 1}
    failed = tmp_path / "run1"
    assert [path.name for path in failed.iterdir()] == ["error.txt"]
    assert (failed / "error.txt").read_text() == "3 steps in a row were not finite\n"


def test_an_ended_run_whose_best_is_lost_is_refused_before_the_others_resume(tmp_path):
    grid, run = Checkpoints(tmp_path), tmp_path / "lr=1"
    with CheckpointWriter(run, -1) as writer:
        writer.save(2, {"best": {}}, best={"prompt/table": jnp.ones(3)})
    batched_runs._check_best(run, 2, grid)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InputError, match=f"delete {run} and {tmp_path}/checkpoints to train"):
        batched_runs._check_best(run, 2, grid)


def test_the_failure_of_a_run_is_reported_whatever_its_file_holds(tmp_path):
    run = GridRun("a", {}, None, tmp_path / "a")
    run.folder.mkdir()
    (run.folder / "error.txt").write_bytes(b"step 3 \xff\n")
    outcome = runner._Work([run], tmp_path, 0, int).outcome()
    assert outcome == ({}, {"a": "step 3 \ufffd"})
