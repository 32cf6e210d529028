"""SIGTERM and Ctrl-C: a command prints in one line what it saved, and exits with 0, 143 or 130.

The exit code of SIGTERM is 0 if the same command can resume, as a training run can, and 143 if the
requested result is missing, so that another command does not take it for finished.

What a signal does depends on where the command is:

- In a block of `held` nothing happens at once; the block checks `heard()` between two steps, saves
  and returns.
- Anywhere else `Stopped` is raised in the main thread, so that partly written files are removed.

Python runs a handler only in the main thread, between two bytecodes: compilation may delay it by
minutes, and a library may swallow an exception. In a process of the command line (`watch`) a thread
therefore ends the process if the main thread has not done so within PATIENCE seconds. All files are
written such that this is safe, like SIGKILL.
"""

import contextlib
import contextvars
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

PATIENCE = 3.0  # seconds that the main thread has to end
NAMES: dict[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
CODES = {number: 128 + number for number in NAMES}  # as a shell tells of a signal


class Stopped(KeyboardInterrupt):
    """A signal ended the command. Libraries let it pass as they do Ctrl-C."""


class _State:
    def __init__(self) -> None:
        self.handled = False  # the handlers are ours
        self.watched = False  # this process is a command: it may be ended without unwinding
        self.reset()

    def reset(self) -> None:
        self.heard = 0  # the first signal
        self.ending = False  # it has raised Stopped
        self.holding = 0  # blocks of `held` around the main thread
        self.note = "before anything was saved"
        self.goes_on = False  # the same command does, where this one was stopped
        self.told = threading.Lock()  # taken once the line is printed


_now = _State()


# Whether what a run saves stays, of the thread that runs it.
_KEEPS: contextvars.ContextVar[bool] = contextvars.ContextVar("keeps", default=True)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def note(text: str) -> None:
    """Sets the text after "stopped by SIGTERM ", until the next call.

    A command that calls this can resume or has finished, so the exit code of SIGTERM is 0 from now
    on.
    """
    _now.note, _now.goes_on = text, True


@contextlib.contextmanager
def noted(text: str) -> Iterator[None]:
    """Sets the text after "stopped by SIGTERM " within a block."""
    before = _now.note, _now.goes_on
    note(text)
    yield  # not restored on an exception: the line may be printed after it
    _now.note, _now.goes_on = before


def heard() -> int:
    """Returns the first signal received, 0 if there was none."""
    return _now.heard


def stopped(number: int, saved: str) -> str:
    """Returns the line to print for a block that stopped at a signal of this or another process."""
    _now.heard, _now.goes_on = number, True
    _now.told.acquire(blocking=False)
    return f"stopped by {NAMES[number]}" + (f" {saved}" if _KEEPS.get() else "; nothing is saved")


@contextlib.contextmanager
def keeping(keeps: bool) -> Iterator[None]:
    """Sets whether the files that a block saves are kept after it."""
    token = _KEEPS.set(keeps)
    try:
        yield
    finally:
        _KEEPS.reset(token)


def ending() -> bool:
    """Returns whether a signal has raised Stopped, which may surface as another exception."""
    return _now.ending


def exit_code(otherwise: int = 0) -> int:
    """Returns the exit code of a command that a signal ended, else `otherwise`."""
    if not _now.heard:
        return otherwise
    return 0 if _now.heard == signal.SIGTERM and _now.goes_on else CODES[_now.heard]


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handles both signals in a block; a nested block has no effect."""
    if _now.handled or not _is_main():
        yield
        return
    _now.reset()
    before = {number: signal.signal(number, _hear) for number in CODES}
    _now.handled = True
    try:
        yield
    finally:
        _now.handled = False
        # A run in another thread, or a later one, must not stop by it.
        _now.heard, _now.ending = 0, False
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held() -> Iterator[Callable[[], int]]:
    """Defers signals within a block, which checks for them. Yields `heard`.

    A second Ctrl-C ends the command at once.
    """
    with handled():
        own = int(_is_main())  # a signal meets the main thread alone
        _now.holding += own
        try:
            yield heard
        finally:
            _now.holding -= own


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Handles signals at once in a part of a `held` block that has nothing to save."""
    if not _is_main():
        yield
        return
    holding, _now.holding = _now.holding, 0
    try:
        check(_now.heard)
        yield
    finally:
        _now.holding = holding


def check(number: int) -> None:
    """Ends the command if `number` is a signal, deferred or received by another process."""
    if number and _now.handled:
        _now.heard = number
        _end()


@contextlib.contextmanager
def starting_children() -> Iterator[None]:
    """Shields child processes of a block from Ctrl-C, which a terminal sends to all processes."""
    with handled():
        with held():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # it is inherited
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not _now.holding:
            check(_now.heard)


def tell() -> None:
    """Prints, once, the line of a command that a signal ended."""
    if _now.told.acquire(blocking=False):
        line = f"stopped by {NAMES[_now.heard]} {_now.note}\n"
        if _now.watched:  # in a handler a print may meet another that it has interrupted
            with contextlib.suppress(OSError):
                os.write(2, line.encode())
        else:
            sys.stderr.write(line)


def watch() -> None:
    """Handles both signals until this process, a command, ends."""
    _now.handled = _now.watched = True
    for number in CODES:
        signal.signal(number, _hear)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    threading.Thread(target=_follow, args=(reads,), daemon=True).start()


def _hear(number: int, _frame: object) -> None:
    if not _now.heard:
        _now.heard = number
        if not _now.holding:
            _end()
    elif number == signal.SIGINT:  # SIGTERM may come twice: to a group, and handed on
        _leave(_now.heard) if _now.watched else _end()


def _end() -> None:
    """Raises Stopped. In a command, stderr is silenced while the stack unwinds."""
    _now.ending = True
    if _now.watched:
        tell()
        _mute()
        _end_children()
        _leave_late(_now.heard)
    raise Stopped


def _follow(reads: int) -> None:
    """Receives signals in a thread, whatever the main thread does."""
    first = 0
    while True:
        number = os.read(reads, 1)[0]
        if number not in CODES:
            continue
        if first and number == signal.SIGINT:
            _leave(first)
        first = first or number
        if not _now.holding:
            _leave_late(first)


def _leave_late(number: int) -> None:
    timer = threading.Timer(PATIENCE, _leave, [number])
    timer.daemon = True
    timer.start()


def _leave(number: int) -> None:
    """Ends this process without unwinding."""
    _now.heard = number
    tell()
    _end_children()
    os._exit(exit_code())


def _mute() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def _end_children() -> None:
    if "multiprocessing.process" in sys.modules:
        from multiprocessing import active_children

        for child in active_children():
            child.kill()
