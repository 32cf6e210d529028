"""SIGTERM and Ctrl-C: one line, an exit code, no child and no noise, wherever the process is."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxprompt import signals

ROOT = Path(__file__).resolve().parents[1]
CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
BEGIN = """
import os, signal, sys, time
from jaxprompt import signals
signals.PATIENCE = 0.2
signals.watch()
signals.note("with step 3 saved; run the same command again to resume")
up = lambda: print("up", flush=True)
try:
    exec({!r})
except signals.Stopped:
    sys.exit(signals.exit_code())
"""


def ended(code: str, *sent: int, group: bool = False, folder: Path = ROOT) -> tuple[int, str]:
    """Runs Python code, and sends signals once it has printed "up". -> exit code, stderr"""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN.format(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            assert process.stdout.readline() == "up\n", process.stderr.read()
            for number in sent:
                os.killpg(process.pid, number) if group else process.send_signal(number)
                time.sleep(0.1)
            return process.wait(20), process.stderr.read()
        finally:
            if process.poll() is None:
                process.kill()


def line(number: int) -> str:
    return f"stopped by {NAMES[number]} with step 3 saved; run the same command again to resume\n"


PLACES = {
    # What is half written goes, and what unwinding tells is not the user's to read.
    "python": """
try:
    up(); time.sleep(20)
finally:
    open("cleaned", "w").close(); print("noise", file=sys.stderr)
""",
    # As while a program compiles: no bytecode runs in the main thread.
    "a C call that does not return": """
import ctypes
lock, call = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
call(lock); up(); call(lock)
""",
    "code that swallows exceptions": """
up()
while True:
    try: time.sleep(20)
    except BaseException: pass
""",
    "a child": """
import multiprocessing
child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(20,))
with signals.starting_children(): child.start()
print(child.pid, file=open("child", "w"))
up(); child.join()
""",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", CODES)
def test_one_line_and_the_exit_code(number, place, tmp_path):
    code = PLACES[place]
    # A terminal sends Ctrl-C to the children too.
    given = dict(group=place == "a child" and number == signal.SIGINT, folder=tmp_path)
    assert ended(code, number, **given) == (CODES[number], line(number))
    assert (tmp_path / "cleaned").exists() == (place == "python")
    if place == "a child":
        child, until = (tmp_path / "child").read_text().strip(), time.monotonic() + 10
        while Path(f"/proc/{child}/cmdline").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}/cmdline").exists()


DEFERRED = """
with signals.deferred() as stop_requested:
    up()
    while not stop_requested(): time.sleep(0.01)
    time.sleep({})
    print(signals.stop_message(stop_requested(), "at step 4; saved"), file=sys.stderr)
sys.exit(signals.exit_code())
"""


def test_a_block_that_saves_is_waited_for():
    """Also by a SIGTERM that comes twice, to the group and handed on."""
    for sent in ([signal.SIGTERM] * 2, [signal.SIGINT]):
        code, err = ended(DEFERRED.format(0.6), *sent)
        assert (code, err) == (CODES[sent[0]], f"stopped by {NAMES[sent[0]]} at step 4; saved\n")


def test_a_second_ctrl_c_ends_at_once():
    start = time.monotonic()
    assert ended(DEFERRED.format(20), *[signal.SIGINT] * 2) == (130, line(signal.SIGINT))
    assert time.monotonic() - start < 10


def test_handlers_are_given_back_and_what_was_heard_forgotten():
    before = [signal.getsignal(number) for number in CODES]
    for _ in range(2):
        with signals.handled(), signals.deferred() as heard:
            assert heard() == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard() == signal.SIGTERM
            with pytest.raises(signals.Stopped), signals.immediate():
                raise AssertionError("a signal that waited is not asked for again")
    assert [signal.getsignal(number) for number in CODES] == before


def test_a_signal_that_a_block_heard_stops_no_later_run():
    """In a notebook: an interrupted cell, then runs in a thread."""
    with signals.handled(), signals.deferred():
        os.kill(os.getpid(), signal.SIGINT)
    assert signals.stop_requested() == 0 and not signals.ending()


def test_a_block_of_a_thread_is_no_block_of_the_main_thread():
    inside, leave = threading.Event(), threading.Event()

    def run():
        with signals.deferred(), signals.immediate():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait(10)
    with signals.handled(), signals.deferred() as heard:
        leave.set()
        thread.join()
        os.kill(os.getpid(), signal.SIGINT)  # waits, for this block has something to save
        assert heard() == signal.SIGINT
    with pytest.raises(signals.Stopped), signals.handled():
        os.kill(os.getpid(), signal.SIGINT)


def test_what_is_not_kept_is_not_promised():
    with signals.keeping(False):
        assert signals.stop_message(signal.SIGINT, "at step 3; saved") == (
            "stopped by Ctrl-C; nothing is saved"
        )
    assert signals.stop_message(signal.SIGINT, "at step 3; saved").endswith("at step 3; saved")
