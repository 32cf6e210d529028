"""A run of `adapt` that is cut off and resumed ends as one that was not, bit for bit."""

import json
from pathlib import Path

import pytest
from tiny_adapt import STEPS, adapted, words_of
from tiny_pretrain import kill, stop
from tiny_run import jaxprompt, read_lines, timeless

pytestmark = pytest.mark.long

KILLED, STOPPED = 8, 10  # SIGKILL once step 8 is saved, then SIGTERM
CASE = "span_corruption-t5"


def assert_same_end(workdir: Path, whole: Path) -> None:
    """Compares metrics, result and what is saved."""
    metrics = [[*map(timeless, read_lines(w / "metrics.jsonl"))] for w in (workdir, whole)]
    assert metrics[0] == metrics[1]
    results = [timeless(json.loads((w / "result.json").read_text())) for w in (workdir, whole)]
    assert results[0] == results[1]
    for name in ("model.safetensors", "config.json"):
        written = [(w / "backbone" / name).read_bytes() for w in (workdir, whole)]
        assert written[0] == written[1], name
    assert not [path for path in workdir.rglob("*") if path.name.endswith(".partial")]


def assert_not_ended(workdir: Path) -> None:
    """Checks that nothing there looks like a result."""
    assert not (workdir / "result.json").exists() and not (workdir / "backbone").exists()


def test_sigkill_then_sigterm_then_the_same_end(tmp_path_factory, tmp_path, capsys):
    """Span corruption by Adafactor."""
    whole, workdir = adapted(tmp_path_factory, CASE), tmp_path / "run"
    words = words_of(tmp_path_factory, CASE, workdir)
    kill(words, tmp_path / "logs", "saved", KILLED)
    assert_not_ended(workdir)
    code, out, err = stop(words, STOPPED, capsys)
    assert code == 0 and out == "" and f"{STEPS} steps, resumed at step {KILLED}" in err
    assert f"stopped by SIGTERM at step {STOPPED}; saved" in err
    assert_not_ended(workdir)
    code, out, err = jaxprompt(capsys, *words)
    assert code == 0 and f"{STEPS} steps, resumed at step {STOPPED}" in err
    assert json.loads(out) == json.loads((workdir / "result.json").read_text())
    assert_same_end(workdir, whole)


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
