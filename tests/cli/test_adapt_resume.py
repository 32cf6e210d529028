"""A run of `adapt` that is cut off and resumed ends as one that was not, bit for bit."""

import json
import os
import signal
from pathlib import Path

import pytest
from processes import Processes
from tiny_adapt import SCORED, STEPS, adapted, words_of
from tiny_run import jaxprompt, read_lines, timeless

pytestmark = pytest.mark.long

KILLED, STOPPED = 8, 10  # SIGKILL once step 8 is saved, then SIGTERM
CASE = "span_corruption-t5"


def assert_same_end(workdir: Path, whole: Path) -> None:
    """Compares metrics, result and what is saved."""
    lines = (read_lines(folder / "metrics.jsonl") for folder in (workdir, whole))
    found, expected = (list(map(timeless, own)) for own in lines)
    assert found == expected
    found, expected = (
        timeless(json.loads((w / "result.json").read_text())) for w in (workdir, whole)
    )
    assert found == expected
    for name in ("model.safetensors", "config.json"):
        found, expected = ((w / "backbone" / name).read_bytes() for w in (workdir, whole))
        assert found == expected, name
    assert not [path for path in workdir.rglob("*") if path.name.endswith(".partial")]


def terminate_at(step: int):
    """Makes this process send itself SIGTERM behind a step."""
    from jaxprompt.training.log import RunLog

    progress = RunLog.progress

    def progress_then_signal(self, at):
        progress(self, at)
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return RunLog, "progress", progress_then_signal


def assert_not_ended(workdir: Path) -> None:
    """Checks that nothing there looks like a result."""
    assert not (workdir / "result.json").exists() and not (workdir / "backbone").exists()


def test_sigkill_then_sigterm_then_the_same_end(tmp_path_factory, tmp_path, capsys, monkeypatch):
    """Span corruption by Adafactor."""
    whole, workdir = adapted(tmp_path_factory, CASE), tmp_path / "run"
    words = words_of(tmp_path_factory, CASE, workdir)
    env = {"XLA_FLAGS": os.environ["XLA_FLAGS"]}
    script = [Path(__file__).with_name("killed.py"), "saved", KILLED]
    with Processes(tmp_path / "logs", env) as processes:
        processes.start([*script, *words])
        assert processes.wait() == [-signal.SIGKILL], processes.told()
    assert_not_ended(workdir)
    with monkeypatch.context() as patch:
        patch.setattr(*terminate_at(STOPPED))
        code, out, err = jaxprompt(capsys, *words)
    assert code == 0 and out == "" and f"{STEPS} steps, resumed at step {KILLED}" in err
    assert (
        f"stopped by SIGTERM at step {STOPPED}; saved, run the same command again to resume" in err
    )
    assert_not_ended(workdir)
    code, out, err = jaxprompt(capsys, *words)
    assert code == 0 and f"{STEPS} steps, resumed at step {STOPPED}" in err
    assert json.loads(out) == json.loads((workdir / "result.json").read_text())
    assert_same_end(workdir, whole)


class Cut(BaseException):
    """Ends a run on the spot."""


def test_cut_off_while_it_saves_and_before_its_result(
    tmp_path_factory, tmp_path, capsys, monkeypatch
):
    """Masked language modelling by AdamW."""
    from jaxprompt.files import folder_checksums
    from jaxprompt.training import checkpoint_folders

    whole, workdir = adapted(tmp_path_factory, "mlm-bert"), tmp_path / "run"
    words = words_of(tmp_path_factory, "mlm-bert", workdir)
    sums = folder_checksums

    def cut_at(path):
        if path.name == f"{KILLED}.orbax-checkpoint-tmp":
            raise Cut
        return sums(path)

    def cut(*_args, **_kwargs):
        raise Cut

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(checkpoint_folders, "folder_checksums", cut_at)
        jaxprompt(capsys, *words)
    assert_not_ended(workdir)
    with monkeypatch.context() as patch, pytest.raises(Cut):  # its backbone is half written
        patch.setattr("jaxprompt.convert.save._replace_folder", cut)
        jaxprompt(capsys, *words)
    assert f"resumed at step {SCORED}" in capsys.readouterr().err
    assert_not_ended(workdir)
    code, out, err = jaxprompt(capsys, *words)
    assert code == 0 and f"{STEPS} steps, resumed at step {STEPS}" in err
    assert json.loads(out) == json.loads((workdir / "result.json").read_text())
    assert_same_end(workdir, whole)
    # A backbone that stands there is its own, also where the workdir is called otherwise.
    (workdir / "result.json").unlink()
    moved = workdir.rename(tmp_path / "moved")
    code, _, err = jaxprompt(capsys, *words_of(tmp_path_factory, "mlm-bert", moved))
    assert code == 0 and (moved / "result.json").exists(), err


def test_a_finished_run_is_not_adapted_again(tmp_path_factory, capsys, monkeypatch):
    def forbid(*_args, **_kwargs):
        raise AssertionError("adapted again")

    workdir = adapted(tmp_path_factory, "mlm-bert")
    times = lambda: {
        p: p.stat().st_mtime_ns for p in workdir.rglob("*") if p.is_file() and p.name != "lock"
    }
    before = times()
    monkeypatch.setattr("jaxprompt.training.steps.make_train_step", forbid)
    code, out, err = jaxprompt(capsys, *words_of(tmp_path_factory, "mlm-bert", workdir))
    assert code == 0 and "already adapted, nothing to do" in err and str(workdir) in err
    assert json.loads(out) == json.loads((workdir / "result.json").read_text())
    assert times() == before
