"""The log reads back exactly, and a resumed run's log equals that of a run without a break."""

import contextlib
import fcntl
import json
import math
import os
import pty
import struct
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from refusing import refuse_line

from jaxprompt.errors import InputError
from jaxprompt.training.log import RunLog, read_metrics


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def loss(step):
    return np.float32(1 / (step + 3))


def run(folder, start, stop):
    with RunLog(folder, tracker="none") as log:
        log.resume(start)
        for step in range(start + 1, stop + 1):
            log.write(step, loss=loss(step), time={"seconds": np.random.rand()})


def test_numbers_read_back_exactly(tmp_path):
    log = RunLog(tmp_path, tracker="none")
    values = {"a": 0.1 + 0.2, "b": np.float32(0.1), "c": jnp.float32(1 / 3), "d": np.int64(2**53)}
    log.write(jnp.int32(4), **values, name="prefix", per_class={"x": [np.float64(5e-324), 1]})
    log.write(5, a=np.nan, b=jnp.float32(np.inf), c={"d": -math.inf}, e=jnp.bfloat16(0.5))
    first, second = records(tmp_path)
    assert first == {
        "step": 4,
        **{
            name: value.item() if hasattr(value, "item") else value
            for name, value in values.items()
        },
        "name": "prefix",
        "per_class": {"x": [5e-324, 1]},
    }
    assert np.float32(first["b"]) == np.float32(0.1)
    assert second == {"step": 5, "a": "NaN", "b": "Infinity", "c": {"d": "-Infinity"}, "e": 0.5}
    assert math.isnan(float(second["a"])) and float(second["c"]["d"]) == -math.inf


def test_resumed_log_equals_one_without_a_break(tmp_path):
    run(tmp_path / "whole", 0, 10)
    run(tmp_path / "broken", 0, 7)
    with open(tmp_path / "broken/metrics.jsonl", "ab") as file:
        file.write(b'{"step": 8, "lo')
    run(tmp_path / "broken", 5, 10)
    results = []
    for name in ("whole", "broken"):
        actual = records(tmp_path / name)
        assert all(record.pop("time")["seconds"] >= 0 for record in actual)
        results.append(actual)
    assert results[0] == results[1]
    assert [record["step"] for record in results[0]] == list(range(1, 11))
    run(tmp_path / "broken", -1, 0)
    assert [record["step"] for record in records(tmp_path / "broken")] == [0]


def test_failed_write_is_one_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with RunLog(tmp_path, tracker="none") as log:
        with pytest.raises(InputError, match="cannot write .*metrics.jsonl: Is a directory"):
            log.write(1)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write .*file"):
        RunLog(tmp_path / "file", tracker="none")


def test_an_evaluation_is_a_line(tmp_path, capsys, clock):
    """With the loss of its step, which need not be one that is logged, and the time left."""
    log = RunLog(tmp_path, tracker="none", total=125, steps_per_epoch=10)
    log.resume(49)
    log.evaluated(49, 8.5e6, "f1", 0.125, "")
    for step in range(50, 126):
        clock[0] += 0.2
        if step == 60:
            log.write(step, loss=0.123456, lr=np.float32(0.02), grad_norm=3.0)
        log.progress(step)
        if step == 75:
            log.write(step, dev={"f1": 0.9, "accuracy": 0.1})
            log.evaluated(step, math.nan, "f1", 0.9, "best")
    log.evaluated(125, 0.1, "f1", 0.8, "")
    log.info("stopped")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step  49/125  epoch  4.9  loss 8.500e+06  dev f1 0.1250",
        "step  75/125  epoch  7.5   0:10 left  loss nan  dev f1 0.9000  best",
        "step 125/125  epoch 12.5   0:00 left  loss 0.1000  dev f1 0.8000",
        "stopped",
    ]


def test_without_a_terminal_the_status_is_a_line_at_regular_times(tmp_path, monkeypatch, clock):
    """Also while nothing is done; any other line counts."""
    lines = []
    stderr = SimpleNamespace(
        write=lambda text: text == "\n" or lines.append((clock[0], text)), flush=lambda: None
    )
    monkeypatch.setattr("sys.stderr", stderr)
    log = RunLog(tmp_path, tracker="none", total=9, steps_per_epoch=3, every=30.0)
    compiling, evaluating = log.activity("compiling"), log.activity("evaluating")
    events = [
        (35, compiling.__enter__),
        (62, lambda: compiling.__exit__(None, None, None)),
        (62, lambda: log.progress(3)),
        (64, lambda: log.write(4, loss=0.25)),
        (64, lambda: log.progress(4)),
        (70, lambda: log.info("a line")),
        (120, evaluating.__enter__),
        (140, lambda: evaluating.__exit__(None, None, None)),
        (140, lambda: log.progress(1)),  # of the next run of a grid
    ]

    def wait(seconds):
        """Lets happen what is due. -> whether the log is closed"""
        clock[0] += seconds
        while events and events[0][0] <= clock[0]:
            events.pop(0)[1]()
        return clock[0] > 180

    monkeypatch.setattr(log, "_closed", SimpleNamespace(wait=wait))
    log._report()
    assert lines == [
        (30, "preparing the first step (0:30)"),
        (60, "compiling (0:25)"),
        (70, "a line"),
        (100, "step 4/9  epoch 1.3   0:10 left  0.5 steps/s  loss 0.2500 (step 4)"),
        (130, "evaluating (0:10)"),
        (160, "step 1/9  epoch 0.3  loss 0.2500 (step 4)"),
    ]


def test_the_status_lines_end_with_the_log(tmp_path, capsys, monkeypatch):
    """They are printed by a thread of their own."""
    monkeypatch.setattr("jaxprompt.training.log._REFRESH", 0.01)
    with RunLog(tmp_path, tracker="none", total=9, every=0.01):
        lines, until = "", time.monotonic() + 60
        while not lines and time.monotonic() < until:
            time.sleep(0.01)
            lines = capsys.readouterr().err
    assert lines.startswith("preparing the first step (0:00)\n")
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


@contextlib.contextmanager
def terminal(monkeypatch, columns):
    """Lets stderr be a terminal. Yields functions that resize it, and that read what it got."""
    main, other = pty.openpty()
    with open(other, "w") as stderr, open(main, "rb", buffering=0) as screen:
        monkeypatch.setattr("sys.stderr", stderr)
        monkeypatch.setenv("TERM", "xterm")

        def resize(columns):
            size = struct.pack("4H", columns and 24, columns, 0, 0)
            fcntl.ioctl(other, termios.TIOCSWINSZ, size)

        resize(columns)
        os.set_blocking(main, False)
        yield resize, lambda: b"".join(iter(lambda: screen.read(100_000), None)).decode()


STATUS = "step 20/30  epoch 2.0   0:10 left  1 steps/s  loss 0.0500 (step 20)"


@pytest.mark.parametrize("columns, later", [(80, 80), (40, 40), (80, 40), (40, 1)])
def test_a_terminal_has_one_updating_line_below_those_that_stay(
    tmp_path, monkeypatch, clock, columns, later
):
    with terminal(monkeypatch, columns) as (resize, read):
        log = RunLog(tmp_path, tracker="none", total=30, steps_per_epoch=10)

        def draw():
            log._show(log._status())

        with log.activity("compiling"):
            clock[0] += 3
            draw()
        for step in range(1, 21):
            clock[0] += 1
            log.progress(step)
        log.write(20, loss=0.05)
        draw()
        resize(later)
        draw()
        log.evaluated(20, 0.05, "accuracy", 0.75, "best")
        draw()
        log._show("")
        text = read()
    parts = text.replace("\r\n", "\n").split("\r\x1b[K")
    line = "step 20/30  epoch 2.0   0:10 left  loss 0.0500  dev accuracy 0.7500  best\n"
    before, after = STATUS[: columns - 1], STATUS[: later - 1]
    assert parts == ["", "compiling (0:03)", before, after, line, after, ""]


@pytest.mark.parametrize("columns, term", [(0, "xterm"), (80, "dumb")])
def test_a_terminal_without_a_size_or_functions_gets_plain_lines(
    tmp_path, monkeypatch, columns, term
):
    with terminal(monkeypatch, columns) as (_, read):
        monkeypatch.setenv("TERM", term)
        log = RunLog(tmp_path, tracker="none", total=30)
        log.info("a line")
        log._show("a status")
        assert read() == "a line\r\n"


def test_the_next_run_has_a_rate_of_its_own(tmp_path, capsys, clock):
    log = RunLog(tmp_path, tracker="none", total=100)
    for seconds in (1.0, 0.25):
        for step in range(1, 51):
            clock[0] += seconds
            log.progress(step)
        log.evaluated(50, 0.0, "f1", 0.5, "")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[-3].strip() for line in lines] == ["0:50 left", "0:12 left"]


def test_records_are_read_without_a_torn_line_and_a_broken_one_is_named(tmp_path):
    assert read_metrics(tmp_path) == []
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}]
    for broken in ("{}", "[1]", "7", '{"step": 1, ', '{"step": "two"}', '{"step": 1, "dev": [1]}'):
        path.write_text(f'{{"step": 0}}\n{broken}\n{{"step": 2}}\n')
        assert "metrics.jsonl:2" in refuse_line(read_metrics, tmp_path)
        assert "metrics.jsonl:2" in refuse_line(RunLog(tmp_path, tracker="none").resume, 2)
    path.unlink()
    for make in (Path.mkdir, os.mkfifo):
        (tmp_path / make.__name__).mkdir()
        make(tmp_path / make.__name__ / "metrics.jsonl")
        assert "metrics.jsonl cannot be read" in refuse_line(read_metrics, tmp_path / make.__name__)


def test_progress_is_of_the_steps_that_the_device_has_ended(tmp_path, capsys, clock):
    """Of those that it was given the host knows no time: the first eight take it none."""
    done = [None]
    log = RunLog(tmp_path, tracker="none", total=40)
    log.finished_step = lambda: done[0]
    for step in range(1, 9):
        log.progress(step)
    assert log._status() == "preparing the first step (0:00)"  # no step is known to be done
    for step in range(9, 20):
        clock[0], done[0] = clock[0] + 10.0, step - 8
        log.progress(step)
    assert log._status() == "step 11/40  epoch 11.0   4:50 left  0.1 steps/s"
