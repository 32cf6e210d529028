"""A run's folder belongs to one config, one record and one process at a time."""

import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from refusing import refuse_line

from jaxprompt.data.sources.digest import SplitRecord
from jaxprompt.data.tasks.task import Task
from jaxprompt.errors import InputError
from jaxprompt.files import add_checksum, is_locked
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_writer import CheckpointWriter
from jaxprompt.training.run_folder import (
    bind_workdir,
    check_record,
    check_workdir,
    lock_workdir,
    read_failure,
    read_result,
    write_record,
)
from jaxprompt.training.run_record import BackboneRecord, TaskRecord
from jaxprompt.training.run_result import RunResult

CONFIG = {"optim": {"lr": 0.1, "name": "adamw"}, "layers": [1, 2], "log": {"every": 5}}
TASK = Task("mine", ("text",), labels=("bad", "good"))
RECORD = TaskRecord(
    task=TASK, choices=1, splits={"train": SplitRecord(3, {"bad": 1, "good": 2}, "a")},
    identity={"tokenizer": "t", "layers": "l"}, template="{text}",
    backbone=BackboneRecord("bert", "f"),
)  # fmt: skip
HOLD = """
import sys, time
from jaxprompt.training.run_folder import lock_workdir
with lock_workdir(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


# -- config ---------------------------------------------------------------------------------------


def test_workdir_keeps_its_config(tmp_path):
    workdir = tmp_path / "a/b"
    bind_workdir(workdir, CONFIG)
    assert json.loads((workdir / "config.json").read_text()) == CONFIG
    bind_workdir(workdir, {**CONFIG, "layers": (1, 2)})

    other = {**CONFIG, "optim": {"lr": 0.3, "momentum": 0.9}}
    line = refuse_line(bind_workdir, workdir, other)
    assert str(workdir) in line and "optim.lr (saved 0.1, now 0.3)" in line
    assert "optim.momentum (saved None, now 0.9)" in line
    assert "optim.name (saved 'adamw', now None)" in line
    assert json.loads((workdir / "config.json").read_text()) == CONFIG

    check_workdir(workdir, {**CONFIG, "later": {"rate": None}})  # a field that came after the run
    assert "later.rate (saved None, now 0.0)" in refuse_line(
        check_workdir, workdir, {**CONFIG, "later": {"rate": 0.0}}
    )

    louder = {**CONFIG, "log": {"every": 50}}
    with pytest.raises(InputError, match="log.every"):
        bind_workdir(workdir, louder, ignored=("log.ev", "lo"))
    bind_workdir(workdir, louder, ignored=("log",))
    assert json.loads((workdir / "config.json").read_text()) == louder


def test_workdir_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    for text in ('{"optim": ', '{"hidden_size": 384}'):
        (tmp_path / "run/config.json").write_text(text)
        line = refuse_line(bind_workdir, tmp_path / "run", CONFIG)
        assert "run/config.json" in line and "delete" not in line
    assert str(tmp_path / "run/config.json") in refuse_line(
        bind_workdir, tmp_path / "run/config.json", CONFIG
    )

    def refuse(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(InputError, match="Permission denied"):
        bind_workdir(tmp_path / "new", CONFIG)
    assert list((tmp_path / "new").iterdir()) == []


def test_what_killed_writes_left_is_removed_at_the_next_start(tmp_path):
    left, others = [".0123456789abcdef.tmp"], [".mine.tmp", "0123456789abcdef.tmp", "notes"]
    for name in (*left, *others):
        (tmp_path / name).write_text("{")
    bind_workdir(tmp_path, CONFIG)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["config.json", *others])


# Found with orbax 0.12 and tensorstore 0.1.86.
BREAKING = ["run[2]", "a**b", "a*", "a?", "a\\b", "a\\", "gs:/run", "my.gs:/run"]
HARMLESS = ["a]b", "a%5Cb", "a#b", "a\nb", "~a", "a:b", "s3:", "file:", "gs:x", "a{0}|$b", "東 京"]


@pytest.mark.parametrize("name", BREAKING)
def test_a_path_that_breaks_checkpoints_is_refused(tmp_path, name):
    # A folder inside too, for "gs:" breaks as a part of the path.
    for workdir in (tmp_path / name, tmp_path / name / "inner"):
        with pytest.raises(InputError, match="checkpoints cannot be saved there: .*use another"):
            check_workdir(workdir, CONFIG)


def test_checkpoints_below_any_other_path(tmp_path):
    """One path with all of them in it, so that one save is enough."""
    workdir = tmp_path.joinpath(*HARMLESS)
    check_workdir(workdir, CONFIG)
    with CheckpointWriter(workdir, -1) as writer:
        writer.save(3, {"step": 3}, state={"a": jnp.arange(6.0)})
    restored, position = Checkpoints(workdir).restore({"a": jnp.zeros(6)})
    np.testing.assert_array_equal(restored["a"], np.arange(6.0))
    assert position == {"step": 3} and (workdir / "checkpoints/3").is_dir()


@pytest.mark.parametrize("inner", ["checkpoints", "checkpoints/3/best"])
def test_the_checkpoints_of_another_run_are_refused(tmp_path, inner):
    """A run there would be in no table."""
    bind_workdir(tmp_path, CONFIG)
    check_workdir(tmp_path / inner, CONFIG)
    (tmp_path / "lock").touch()
    assert f"the run {tmp_path};" in refuse_line(check_workdir, tmp_path / inner, CONFIG)
    check_workdir(tmp_path / "new", CONFIG)


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "record.json", "checkpoints"])
def test_a_folder_of_someone_else_is_refused(tmp_path, name):
    (tmp_path / name).write_text("precious\n")
    assert name in refuse_line(check_workdir, tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    check_workdir(tmp_path, CONFIG)


# -- record and result ----------------------------------------------------------------------------


def test_a_record_names_what_differs(tmp_path):
    check_record(tmp_path, RECORD)  # nothing is recorded yet
    write_record(tmp_path, RECORD)
    check_record(tmp_path, RECORD)
    task = dataclasses.replace(TASK, labels=("bad", "fine"))
    changed = dataclasses.replace(RECORD, task=task)
    line = refuse_line(check_record, tmp_path, changed)
    assert "task.labels (saved ['bad', 'good'], now ['bad', 'fine'])" in line
    train = RECORD.splits["train"]
    train = dataclasses.replace(train, digest="0", examples=4)
    line = refuse_line(check_record, tmp_path, dataclasses.replace(RECORD, splits={"train": train}))
    # A digest says least, so it comes last.
    assert line.index("splits.train.examples (saved") < line.index("splits.train.digest (saved")
    path = tmp_path / "record.json"
    for text in (path.read_text().replace('"good"', '"fine"'), "{}"):
        path.write_text(text)
        assert "record.json was changed" in refuse_line(check_record, tmp_path, changed)


def test_a_record_whose_task_no_run_has_is_refused(tmp_path):
    values = json.loads(json.dumps(RECORD.to_json()))
    values["task"]["words"] = [["a"], []]
    (tmp_path / "record.json").write_text(json.dumps(add_checksum(values)))
    assert "record.json: task.labels" in refuse_line(check_record, tmp_path, RECORD)


@pytest.mark.parametrize("text", ["[]", "{}", '{"best_step": "3"}', '{"best', "null"])
def test_only_a_result_is_a_result(tmp_path, text):
    assert read_result(tmp_path) is None
    (tmp_path / "result.json").write_text(text)
    assert "result.json" in refuse_line(read_result, tmp_path)
    (tmp_path / "result.json").write_text('{"best_step": 3}')
    assert read_result(tmp_path) == RunResult(best_step=3)


def test_a_failure_is_read_from_a_regular_file(tmp_path):
    assert read_failure(tmp_path) is None
    os.mkfifo(tmp_path / "error.txt")  # would be waited for
    assert "error.txt cannot be read" in refuse_line(read_failure, tmp_path)


# -- lock -----------------------------------------------------------------------------------------


def test_another_process_waits_outside_until_the_first_dies(tmp_path):
    workdir = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(workdir)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(InputError, match=f"{workdir} .*process {holder.pid} on "):
        lock_workdir(workdir).__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with lock_workdir(workdir):
        assert f"process {os.getpid()} on " in (workdir / "lock").read_text()
        with pytest.raises(InputError, match="is in use"), lock_workdir(workdir):
            pass
    with lock_workdir(workdir):
        pass


def test_a_refused_command_leaves_nothing(tmp_path):
    with pytest.raises(InputError, match="bad data"), lock_workdir(tmp_path / "new/run"):
        raise InputError("bad data")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "users").mkdir()
    with lock_workdir(tmp_path / "users"):
        pass
    assert list((tmp_path / "users").iterdir()) == []
    with lock_workdir(tmp_path / "bound"):
        bind_workdir(tmp_path / "bound", CONFIG)
    assert (tmp_path / "bound/lock").exists()


def test_a_lock_that_was_removed_in_between_is_taken_anew(tmp_path, monkeypatch):
    """Else two processes would hold two files of one name."""
    flock, removed = fcntl.flock, []

    def remove_first(locked, how):
        if not removed:
            removed.append(locked)
            (tmp_path / "lock").unlink()
        flock(locked, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with lock_workdir(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / "lock").read_text()
        with pytest.raises(InputError, match="is in use"), lock_workdir(tmp_path):
            pass


def test_a_planted_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("as it was")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="cannot write .*lock"), lock_workdir(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "as it was"


@pytest.mark.parametrize("what", ["pipe", "full disk"])
def test_a_lock_that_cannot_be_written_is_refused(tmp_path, monkeypatch, what):
    def fill(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if what == "pipe":
        os.mkfifo(tmp_path / "lock")
        assert not is_locked(tmp_path)
    else:
        monkeypatch.setattr(os, "write", fill)
    with pytest.raises(InputError, match="cannot write .*lock"), lock_workdir(tmp_path):
        pass


def test_without_locks_a_run_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    def refuse(*_args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_workdir(tmp_path):
        pass
    assert "cannot be locked (No locks available)" in capsys.readouterr().err
