"""A signal at any moment of a command: one line that says what is saved, and nothing half written.

What it does to a process test_signals tells, and between two steps test_resume and others.
"""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from processes import Processes
from tiny_adapt import adapted, without_result, words_of
from tiny_run import flags, jaxprompt, tiny_fields

CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
HERE = Path(__file__).parent
FIRST = "before the first step; nothing was saved"
LAST = "after the last step; saved, run the same command again to finish"
INDEXING = "while indexing the corpus; the index is not saved, run the same command again"


def test_xla_logs_no_warnings(monkeypatch, capsys):
    """Unless it is told to: that it compiles slowly and the like it calls an error."""
    for level, expected in (None, "3"), ("1", "1"):
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
        if level:
            monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
        assert jaxprompt(capsys, "--help")[0] == 0
        assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == expected


def gets(number: int):
    """Makes a function in whose place this process gets a signal."""

    def call(*_args, **_kwargs):
        os.kill(os.getpid(), number)
        time.sleep(1)
        raise AssertionError("the command goes on")

    return call


def test_as_jax_is_imported(tmp_path):
    config = HERE.parents[1] / "configs/base.py"
    words = ["train", f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    with Processes(tmp_path / "logs") as processes:
        processes.start([HERE / "signalled.py", "jax", int(signal.SIGTERM), *words])
        assert processes.wait(60) == [128 + signal.SIGTERM], processes.told()
        assert processes.err(0) == "stopped by SIGTERM before anything was saved\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", CODES)
def test_an_answer_that_is_not_there_is_no_success(number, tmp_path, monkeypatch, capsys):
    """Else `predict --output=x && upload x` would go on."""
    monkeypatch.setattr("jaxprompt.build.prompt_artifact.read_export", gets(number))
    code, out, err = jaxprompt(capsys, "predict", f"--prompt={tmp_path}", "--text=a")
    assert (code, out) == (128 + number, "")
    assert err == f"stopped by {NAMES[number]} before anything was saved\n"


@pytest.mark.long
def test_ctrl_c_while_processes_index(tmp_path_factory, tmp_path):
    """A terminal sends it to all of them."""
    words = words_of(
        tmp_path_factory, "mlm-bert", tmp_path / "run", corpus__processes=2,
        corpus__store=tmp_path / "store",
    )  # fmt: skip
    with Processes(tmp_path / "logs", devices=1) as processes:
        processes.start([HERE / "signalled.py", "indexing", int(signal.SIGINT), *words])
        group = processes.all[0].pid
        assert processes.wait() == [130], processes.told()
        assert processes.err(0) == f"stopped by Ctrl-C {INDEXING}\n"
        until = time.monotonic() + 10
        with pytest.raises(ProcessLookupError):  # once init has buried the last child
            while time.monotonic() < until:
                os.killpg(group, 0)
                time.sleep(0.05)
    assert not [path for path in (tmp_path / "store").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    "place, number, said",
    [
        ("build.task.read_examples", signal.SIGTERM, FIRST),
        ("training.one_run.jit", signal.SIGINT, FIRST),
        ("training.run_folder.write_result", signal.SIGTERM, LAST),
    ],
)
def test_train(place, number, said, backbone, data, tmp_path, monkeypatch, capsys):
    is_step = place == "training.one_run.jit"  # its first call compiles
    instead = (lambda *_, **__: gets(number)) if is_step else gets(number)
    monkeypatch.setattr(f"jaxprompt.{place}", instead)
    words = flags(tiny_fields(backbone, data))
    words = ["train", f"--config={HERE.parents[1] / 'configs/base.py'}", *words]
    before = [signal.getsignal(each) for each in CODES]
    code, out, err = jaxprompt(capsys, *words, f"--workdir={tmp_path}")
    assert code == CODES[number] and out == ""
    assert err.splitlines()[-1] == f"stopped by {NAMES[number]} {said}"
    assert [signal.getsignal(each) for each in CODES] == before
    assert not (tmp_path / "result.json").exists()


def test_while_a_backbone_is_written(tmp_path_factory, tmp_path, monkeypatch, capsys):
    workdir = without_result(adapted(tmp_path_factory, "mlm-bert"), tmp_path / "run")
    shutil.rmtree(workdir / "backbone")  # which says that it is of the run that was copied
    words = words_of(tmp_path_factory, "mlm-bert", workdir)
    with monkeypatch.context() as patch:
        patch.setattr("jaxprompt.convert.save._gather", gets(signal.SIGTERM))
        code, out, err = jaxprompt(capsys, *words)
    assert code == 0 and out == ""
    assert err.splitlines()[-1] == f"stopped by SIGTERM {LAST}"
    assert not (workdir / "backbone").exists() and not list(workdir.glob(".*.partial"))
