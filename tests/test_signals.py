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
    # An exception in the initialisation of its C++ modules would crash the process.
    "an import of jax": """
sys.path.insert(0, os.getcwd())
open("jax.py", "w").write("import time\\nprint('up', flush=True)\\ntime.sleep(20)")
try: import jax
finally: open("unwound", "w").close()
""",
    "a child": """
import multiprocessing
child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(20,))
with signals.starting_children(): child.start()
print(child.pid, file=open("child", "w"))
up(); child.join()
""",
}


def test_a_stopped_command_cannot_become_one_that_can_resume():
    """An end that takes longer than PATIENCE has the exit code of the signal."""
    code = "signals._now.can_resume = False\ntry:\n    up(); time.sleep(20)\n"
    code += "finally:\n    signals.note('after the command had finished'); time.sleep(20)"
    assert ended(code, signal.SIGTERM)[0] == 143


@pytest.mark.parametrize("number", CODES)
def test_a_signal_at_the_end_of_python_does_not_change_the_exit_code(number):
    """Python restores the default handlers, which end the process, before it frees modules."""
    code = """
class Last:
    def __del__(self, up=up, sleep=time.sleep): up(); sleep(0.3)
last = Last()
sys.exit(5)
"""
    assert ended(code, number, number) == (5, "")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", CODES)
def test_one_line_and_the_exit_code(number, place, tmp_path):
    code = PLACES[place]
    # A terminal sends Ctrl-C to the children too.
    is_group = place == "a child" and number == signal.SIGINT
    assert ended(code, number, group=is_group, folder=tmp_path) == (CODES[number], line(number))
    assert (tmp_path / "cleaned").exists() == (place == "python")
    assert not (tmp_path / "unwound").exists()
    if place == "a child":
        child, until = (tmp_path / "child").read_text().strip(), time.monotonic() + 10
        while Path(f"/proc/{child}/cmdline").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}/cmdline").exists()


DEFERRED = """
def slow_log(line):
    time.sleep({log_seconds})
    print(line, file=sys.stderr, flush=True)
with signals.deferred() as stop_requested:
    up()
    while not stop_requested(): time.sleep(0.01)
    time.sleep({save_seconds})
    signals.log_stopped(slow_log, stop_requested(), "at step 4; saved")
    time.sleep({end_seconds})
sys.exit(signals.exit_code())
"""


@pytest.mark.parametrize("numbers", [[signal.SIGTERM] * 2, [signal.SIGINT]])
def test_a_deferred_block_saves_after_any_signals_but_a_second_ctrl_c(numbers):
    code = DEFERRED.format(log_seconds=0, save_seconds=0.6, end_seconds=0)
    line = f"stopped by {NAMES[numbers[0]]} at step 4; saved\n"
    assert ended(code, *numbers) == (CODES[numbers[0]], line)


def test_a_second_ctrl_c_ends_at_once():
    code = DEFERRED.format(log_seconds=0, save_seconds=20, end_seconds=0)
    start = time.monotonic()
    assert ended(code, *[signal.SIGINT] * 2) == (130, line(signal.SIGINT))
    assert time.monotonic() - start < 10


def test_a_second_ctrl_c_waits_for_a_line_that_is_being_printed():
    code = DEFERRED.format(log_seconds=0.5, save_seconds=0, end_seconds=20)
    assert ended(code, *[signal.SIGINT] * 2) == (130, "stopped by Ctrl-C at step 4; saved\n")


def test_handlers_and_state_are_restored():
    """Of a deferred signal too: an interrupted cell of a notebook stops no later run."""
    handlers = [signal.getsignal(number) for number in CODES]
    for _ in range(2):
        with signals.handled(), signals.deferred() as stop_requested:
            assert stop_requested() == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop_requested() == signal.SIGTERM
            with pytest.raises(signals.Stopped), signals.immediate():
                raise AssertionError("the deferred signal is ignored")
    assert [signal.getsignal(number) for number in CODES] == handlers
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
    with signals.handled(), signals.deferred() as stop_requested:
        leave.set()
        thread.join()
        os.kill(os.getpid(), signal.SIGINT)  # waits, for this block has something to save
        assert stop_requested() == signal.SIGINT
    with pytest.raises(signals.Stopped), signals.handled():
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_line_promises_only_kept_files(is_kept):
    lines = []
    with signals.keeping(is_kept):
        signals.log_stopped(lines.append, signal.SIGINT, "at step 3; saved")
    saved = " at step 3; saved" if is_kept else "; nothing is saved"
    assert lines == [f"stopped by Ctrl-C{saved}"]
