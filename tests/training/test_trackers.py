"""Trackers get the numbers of a run, and what they fail at is one line."""

import contextvars
import gc
import io
import resource
import shutil
import sys
import time
from types import ModuleType, SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from refusing import refuse_line

from jaxprompt.errors import InputError
from jaxprompt.training import log as log_module
from jaxprompt.training.log import RunLog, read_metrics
from jaxprompt.training.trackers import TRACKERS

SERVICES = ("wandb", "trackio")


# -- event files ----------------------------------------------------------------------------------


def read_events(folder):
    """Reads scalars as TensorBoard shows them: a session start hides what stood at later steps."""
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import masked_crc32c

    shown = []
    for path in sorted(folder.iterdir()):
        data = io.BytesIO(path.read_bytes())
        while header := data.read(8):
            data.read(4)
            body = data.read(int.from_bytes(header, "little"))
            assert int.from_bytes(data.read(4), "little") == masked_crc32c(body)
            event = event_pb2.Event.FromString(body)
            if event.session_log.status == event_pb2.SessionLog.START:
                shown = [scalar for scalar in shown if scalar[0] < event.step]
            shown += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    return shown


def loss(step):
    return np.float32(1 / (step + 3))


def test_events_of_a_resumed_run(tmp_path, monkeypatch):
    """Also on a machine whose clock is a day behind: files are read in the order of their names."""
    now = time.time()
    for start, stop, late in ((-1, 5, 0), (3, 6, 86400)):
        monkeypatch.setattr(time, "time", lambda late=late: now - late)
        with RunLog(tmp_path) as log:
            log.resume(start)
            for step in range(start + 1, stop + 1):
                log.write(step, loss=loss(step), name="x", dev={"f1": 0.5}, time={"rate": 2})
    expected = []
    for step in range(7):
        expected += [(step, "dev/f1", 0.5), (step, "loss", float(loss(step)))]
        expected.append((step, "time/rate", 2))
    assert read_events(tmp_path / "tensorboard") == expected
    assert "tensorflow" not in sys.modules


def test_events_can_be_read_at_each_evaluation(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(1, loss=0.5)
        log.write(2, dev={"f1": 0.25})
        assert read_events(tmp_path / "tensorboard") == [(1, "loss", 0.5), (2, "dev/f1", 0.25)]


@pytest.mark.parametrize(
    "name, more", [("metrics.jsonl", {}), ("tensorboard", {}), ("tensorboard", {"dev": 1.0})]
)
def test_a_full_disk_is_one_error(name, more, tmp_path, capfd, monkeypatch):
    """In whichever file and write it shows first; nothing is printed, no closing masks it."""
    if name == "tensorboard":  # the records go elsewhere, the events alone meet the limit
        monkeypatch.setattr(log_module, "open_regular", lambda _path, mode: open("/dev/null", mode))
    values = {f"value{i}": 1.0 for i in range(30)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(InputError, match=f"cannot write .*{name}: File too large; fix this"):
            with RunLog(tmp_path) as log:
                log.write(1, loss=1.0)
                resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
                log.write(2, **values, **more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()  # a file that is not closed would be flushed again
    assert capfd.readouterr() == ("", "")


# -- wandb and trackio ----------------------------------------------------------------------------


class Service(ModuleType):
    """Stands for a package: notes the runs that are opened, what they log, and their ends.

    As in trackio, a run ends the one before it in the same context; wandb takes `reinit` for that.
    """

    __file__ = "stand-in"

    def __init__(self, name):
        super().__init__(name)
        self.opened, self.logged, self.finished, self.broken = [], [], 0, ""
        self.current = contextvars.ContextVar("current", default=None)

    def _call(self, name):
        if name == self.broken:
            raise RuntimeError("the server\nsaid no.")

    def init(self, **options):
        print("* hello")
        self._call("init")
        self.opened.append(options)
        if self.current.get() is not None and options.get("reinit") != "create_new":
            self.finish()
        self.current.set(options)
        return SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, values, *, step):
        self._call("log")
        self.logged.append((step, values))

    def finish(self):
        self._call("finish")
        self.finished += 1


@pytest.fixture(params=SERVICES)
def service(request, monkeypatch):
    service = Service(request.param)
    monkeypatch.setitem(sys.modules, request.param, service)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return service


def train(folder, name):
    with RunLog(folder, tracker=name) as log:
        log.resume(-1)
        log.write(10, loss=np.float32(0.5), lr={"prompt": 1e-2}, name="x", skipped=0)
        log.write(jnp.int32(10), dev={"accuracy": jnp.bfloat16(0.5), "f1": [0.25]})


def identity(options):
    """What both packages find a run again by."""
    return options["id"] if "id" in options else options["name"]


def test_a_service_gets_the_numbers(service, tmp_path, capsys):
    train(tmp_path / "first", service.__name__)
    assert service.logged == [
        (10, {"loss": 0.5, "lr/prompt": 1e-2, "skipped": 0.0}),
        (10, {"dev/accuracy": 0.5}),
    ]
    assert all(type(x) is float for _, values in service.logged for x in values.values())
    assert service.finished == 1
    assert [record["step"] for record in read_metrics(tmp_path / "first")] == [10, 10]
    assert not (tmp_path / "first/tensorboard").exists()
    assert capsys.readouterr() == ("", "* hello\n")  # stdout is for results


def test_a_workdir_has_one_run_of_its_own(service, tmp_path, monkeypatch):
    train(tmp_path / "first", service.__name__)
    train(tmp_path / "second", service.__name__)
    monkeypatch.chdir(tmp_path)
    train("first/../first", service.__name__)
    first, second, again = service.opened
    assert again == first
    assert identity(first) != identity(second)
    assert [options["name"].partition("-")[0] for options in (first, second)] == ["first", "second"]
    assert all(options["resume"] == "allow" for options in service.opened)
    assert all(options["project"] == "jaxprompt" for options in service.opened)


def test_a_folder_that_was_deleted_is_another_run(service, tmp_path):
    """Else wandb would drop all of its steps that the run before has had already."""
    train(tmp_path / "first", service.__name__)
    shutil.rmtree(tmp_path / "first")
    train(tmp_path / "first", service.__name__)
    before, after = service.opened
    assert identity(before) != identity(after)


def test_wandb_keeps_its_files_in_the_workdir_and_obeys_its_environment(tmp_path, monkeypatch):
    service = Service("wandb")
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    train(tmp_path, "wandb")
    (options,) = service.opened
    assert (
        options["dir"] == str(tmp_path)
        and options["project"] == "mine"
        and options["config"] is None
    )
    assert options["reinit"] == "create_new" and "mode" not in options


def test_runs_of_a_grid_are_open_at_once(service, tmp_path):
    with (
        RunLog(tmp_path / "a", tracker=service.__name__) as first,
        RunLog(tmp_path / "b", tracker=service.__name__) as second,
    ):
        first.write(1, loss=1.0)
        second.write(1, loss=2.0)
    assert len({identity(options) for options in service.opened}) == service.finished == 2


def test_other_processes_write_nothing(service, tmp_path, capsys):
    with RunLog(tmp_path, tracker=service.__name__, enabled=False, total=9) as log:
        log.resume(3)
        log.write(4, loss=1.0, dev=0.5)
        log.progress(4)
        log.info("hello")
    assert service.opened == service.logged == [] and service.finished == 0
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_service_that_fails_is_one_line(broken, service, tmp_path):
    service.broken = broken
    line = refuse_line(train, tmp_path, service.__name__)
    assert line.startswith(f"train.tracker={service.__name__}: the server said no; ")
    assert service.finished == (broken == "log")  # what was sent before is kept


def test_an_error_of_the_run_is_not_masked(service, tmp_path):
    service.broken = "finish"
    with pytest.raises(ZeroDivisionError):
        with RunLog(tmp_path, tracker=service.__name__):
            raise ZeroDivisionError


# -- any ------------------------------------------------------------------------------------------


def test_none_needs_no_package(tmp_path, monkeypatch):
    for name in TRACKERS:
        monkeypatch.setitem(sys.modules, TRACKERS[name].PACKAGE or "none", None)
    with RunLog(tmp_path, tracker="none") as log:
        log.write(1, dev={"f1": 0.5})
    assert read_metrics(tmp_path) == [{"step": 1, "dev": {"f1": 0.5}}]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
