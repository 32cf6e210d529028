"""The log reads back exactly, and a resumed run's log equals that of a run without a break."""

import json
import math
import os
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
    with RunLog(folder, tracker="none", terminal=False) as log:
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
        found = records(tmp_path / name)
        assert all(record.pop("time")["seconds"] >= 0 for record in found)
        results.append(found)
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


def test_plain_progress_is_a_line_at_each_evaluation(tmp_path, capsys, clock):
    log = RunLog(tmp_path, tracker="none", terminal=False, total=125)
    log.resume(49)
    for step in range(50, 126):
        clock[0] += 0.2
        if step == 60:
            log.write(step, loss=0.123456, lr=np.float32(0.02), grad_norm=3.0)
        log.progress(step)
        if step == 75:
            log.write(step, dev={"f1": 0.9, "accuracy": 0.1})
    log.write(125, loss=0.1, lr={"head": 0.03, "prompt": 1e-4})
    log.write(125, dev=0.8)
    log.info("stopped")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step 75/125  5 steps/s  0:10 left  loss 0.1235  lr 0.02  dev 0.9",
        "step 125/125  5 steps/s  0:00 left  loss 0.1  lr head 0.03 prompt 0.0001  dev 0.8",
        "stopped",
    ]


def test_plain_progress_is_a_line_at_regular_times(tmp_path, monkeypatch, clock):
    """Also while nothing is done; a line at an evaluation counts."""
    lines = []
    stderr = SimpleNamespace(
        write=lambda text: text == "\n" or lines.append((clock[0], text)), flush=lambda: None
    )
    monkeypatch.setattr("sys.stderr", stderr)
    log = RunLog(tmp_path, tracker="none", terminal=False, total=9, every=30.0)
    events = [
        (35.0, lambda: log.progress(3)),
        (40.0, lambda: log.show(dev=0.5)),
        (50.0, lambda: log.show(dev=0.25)),
        (90.0, lambda: log.progress(9)),
        (150.0, lambda: log.progress(1)),  # of the next run of a grid
    ]

    def wait(seconds):
        """Lets happen what is due before a wait is over. -> whether the log is closed"""
        end = clock[0] + seconds
        while events and events[0][0] < end:
            clock[0], event = events.pop(0)
            event()
        clock[0] = end
        return end > 180

    monkeypatch.setattr(log, "_closed", SimpleNamespace(wait=wait))
    log._print_regularly()
    assert lines == [
        (30, "still preparing or compiling the first of 9 steps (0:30)"),
        (40, "step 3/9  dev 0.5"),
        (50, "step 3/9  dev 0.25"),
        (80, "step 3/9  dev 0.25"),
        (110, "evaluating after step 9 (0:20)"),
        (140, "evaluating after step 9 (0:50)"),
        (170, "step 1/9  dev 0.25"),
    ]


def test_lines_at_regular_times_end_with_the_log(tmp_path, capsys):
    """They are printed by a thread of their own."""
    with RunLog(tmp_path, tracker="none", terminal=False, total=9, every=0.01):
        told, until = "", time.monotonic() + 60
        while not told and time.monotonic() < until:
            time.sleep(0.01)
            told = capsys.readouterr().err
    assert told.startswith("still preparing or compiling the first of 9 steps (0:00)\n")
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("size, is_bar", [(0, False), (24, True)])
def test_a_terminal_without_room_gets_plain_lines(tmp_path, monkeypatch, size, is_bar):
    """As some that nobody sets the size of; a bar would break there."""
    import fcntl
    import pty
    import struct
    import termios

    main, other = pty.openpty()
    with open(other, "w") as terminal, open(main, "rb", buffering=0) as screen:
        monkeypatch.setattr("sys.stderr", terminal)
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("4H", size, 4 * size, 0, 0))
        with RunLog(tmp_path, tracker="none", total=2) as log:
            for step in (1, 2):
                log.progress(step)
                log.show(dev=0.5)
        assert (b"|" in screen.read(10_000)) == is_bar


def test_the_next_run_has_a_rate_of_its_own(tmp_path, capsys, clock):
    log = RunLog(tmp_path, tracker="none", terminal=False, total=100)
    for seconds in (1.0, 0.25):
        for step in range(1, 101):
            clock[0] += seconds
            log.progress(step)
            if step % 50 == 0:
                log.show(dev=0.5)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[1] for line in lines] == ["1 steps/s"] * 2 + ["4 steps/s"] * 2


def test_the_next_run_has_a_bar_of_its_own(tmp_path, capsys):
    with RunLog(tmp_path, tracker="none", terminal=True, total=30) as log:
        for first in (21, 1):  # a run that was resumed, then one from its start
            for step in range(first, 31):
                log.progress(step)
    bars = [line.split("\r")[-1] for line in capsys.readouterr().err.rstrip("\n").split("\n")]
    assert len(bars) == 2 and all("30/30" in bar for bar in bars)


def test_terminal_progress_is_one_updating_line(tmp_path, capsys):
    with RunLog(tmp_path, tracker="none", terminal=True, total=30) as log:
        for step in range(11, 31):
            log.write(step, loss=1 / step, dev=0.75)
            log.progress(step)
        log.info("best at 20")
    out, err = capsys.readouterr()
    assert out == ""
    last = err.replace("\r", "\n").rstrip().splitlines()[-1]
    assert "30/30" in last and "loss=0.0333" in last and "dev=0.75" in last
    assert "best at 20\n" in err


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
        assert "metrics.jsonl is not a file" in refuse_line(read_metrics, tmp_path / make.__name__)


def test_progress_is_of_the_steps_that_the_device_has_ended(tmp_path, capsys, clock):
    """Of those that it was given the host knows no time: the first eight take it none."""
    done = [None]
    log = RunLog(tmp_path, tracker="none", terminal=False, total=40)
    log.finished_step = lambda: done[0]
    for step in range(1, 9):
        log.progress(step)
    log.show(dev=0.25)
    assert capsys.readouterr().err == ""  # no step is known to be done
    for step in range(9, 20):
        clock[0], done[0] = clock[0] + 10.0, step - 8
        log.progress(step)
    log.show(dev=0.5)
    assert capsys.readouterr().err == "step 11/40  0.1 steps/s  4:50 left  dev 0.5\n"
