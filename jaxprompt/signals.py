"""SIGTERM and Ctrl-C: a command prints in one line what it saved, and exits with 0, 143 or 130.

The exit code of SIGTERM is 0 if the same command can resume, as a training run can, and 143 if the
requested result is missing, so that another command does not take it for finished.

What a signal does depends on where the command is:

- In a block of `deferred` nothing happens immediately: the block checks `stop_requested()` between
  two steps, saves and returns.
- Anywhere else `Stopped` is raised in the main thread, so that partly written files are removed.

Python runs a handler only in the main thread, between two bytecodes: compilation may delay it by
minutes, and a library may swallow an exception. In a process of the command line (`watch`) a thread
therefore ends the process PATIENCE seconds after a signal, and at a second Ctrl-C. All files are
written such that this is safe, like SIGKILL.
"""

import atexit
import contextlib
import contextvars
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

PATIENCE = 3.0  # seconds that the main thread has to end
NAMES: dict[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
CODES = {number: 128 + number for number in NAMES}  # exit codes, as of a shell


class Stopped(KeyboardInterrupt):
    """A signal ended the command. Libraries let it pass as they do Ctrl-C."""


class _State:
    def __init__(self) -> None:
        self.handled = False  # whether `_on_signal` is installed
        self.watched = False  # whether this process is a command, which may end without unwinding
        self.reset()

    def reset(self) -> None:
        self.received = 0  # the first signal
        self.ending = False  # whether it has raised Stopped
        self.num_deferred = 0  # blocks of `deferred` around the main thread
        self.note = "before anything was saved"
        self.can_resume = False  # whether the same command resumes a stopped one
        self.printing = threading.Lock()  # held while the line is printed
        self.is_printed = False


_now = _State()


# Whether the files of a run are kept, by the thread of the run.
_KEEPS: contextvars.ContextVar[bool] = contextvars.ContextVar("keeps", default=True)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def note(text: str) -> None:
    """Sets the text after "stopped by SIGTERM ", until the next call.

    A command that calls this can resume or has finished, so the exit code of SIGTERM is 0 from now
    on. Has no effect after a signal, which the command already ends with.
    """
    if not _now.ending:
        _now.note, _now.can_resume = text, True


@contextlib.contextmanager
def noted(text: str) -> Iterator[None]:
    """Sets the text after "stopped by SIGTERM " within a block."""
    old_note = _now.note, _now.can_resume
    note(text)
    yield  # not restored after an exception, because the line may be printed later
    _now.note, _now.can_resume = old_note


def stop_requested() -> int:
    """Returns the first signal received, 0 if there was none."""
    return _now.received


def log_stopped(log: Callable[[str], None], number: int, saved: str) -> None:
    """Logs the line of a block that stopped at a signal of this or another process."""
    _now.received, _now.can_resume = number, True
    with _now.printing:
        log(f"stopped by {NAMES[number]}" + (f" {saved}" if _KEEPS.get() else "; nothing is saved"))
        _now.is_printed = True


@contextlib.contextmanager
def keeping(is_kept: bool) -> Iterator[None]:
    """Sets whether the files that a block saves are kept after it."""
    token = _KEEPS.set(is_kept)
    try:
        yield
    finally:
        _KEEPS.reset(token)


def ending() -> bool:
    """Returns whether a signal has raised Stopped, which may surface as another exception."""
    return _now.ending


def exit_code(otherwise: int = 0) -> int:
    """Returns the exit code of a command that a signal ended, else `otherwise`."""
    if not _now.received:
        return otherwise
    return 0 if _now.received == signal.SIGTERM and _now.can_resume else CODES[_now.received]


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handles both signals in a block; a nested block has no effect."""
    if _now.handled or not _is_main():
        yield
        return
    _now.reset()
    old_handlers = {number: signal.signal(number, _on_signal) for number in CODES}
    _now.handled = True
    try:
        yield
    finally:
        _now.handled = False
        # A run in another thread, or a later run, must not be stopped by it.
        _now.received, _now.ending = 0, False
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], int]]:
    """Defers signals within a block, which checks for them. Yields `stop_requested`.

    A second Ctrl-C ends the command at once.
    """
    with handled():
        in_main = int(_is_main())  # signals only reach the main thread
        _now.num_deferred += in_main
        try:
            yield stop_requested
        finally:
            _now.num_deferred -= in_main


@contextlib.contextmanager
def immediate() -> Iterator[None]:
    """Handles signals immediately in a part of a `deferred` block that has nothing to save."""
    if not _is_main():
        yield
        return
    num_deferred, _now.num_deferred = _now.num_deferred, 0
    try:
        stop_on_signal(_now.received)
        yield
    finally:
        _now.num_deferred = num_deferred


def stop_on_signal(number: int) -> None:
    """Ends the command if `number` is a signal, deferred or received by another process."""
    if number and _now.handled:
        _now.received = number
        _raise_stopped()


@contextlib.contextmanager
def starting_children() -> Iterator[None]:
    """Shields child processes of a block from Ctrl-C, which a terminal sends to all processes."""
    with handled():
        with deferred():
            old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # it is inherited
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        if not _now.num_deferred:
            stop_on_signal(_now.received)


def print_stopped() -> None:
    """Prints, once, the line of a command that a signal ended."""
    # The other thread may be printing it: this one must not end the process before. It gives up
    # where that one waits for a full pipe.
    has_lock = _now.printing.acquire(timeout=1)
    if has_lock and not _now.is_printed:
        # Below a status line and the "^C" of the terminal.
        start = "\n" if os.isatty(2) else ""
        line = f"{start}stopped by {NAMES[_now.received]} {_now.note}\n"
        if _now.watched:  # a handler may have interrupted another print
            with contextlib.suppress(OSError):
                os.write(2, line.encode())
        else:
            sys.stderr.write(line)
        _now.is_printed = True
    if has_lock:
        _now.printing.release()


def watch() -> None:
    """Handles both signals until this process, a command, ends."""
    _now.handled = _now.watched = True
    for number in CODES:
        signal.signal(number, _on_signal)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_read_signals, args=(read_end,), daemon=True).start()
    atexit.register(_ignore_signals)  # it runs after the functions that are registered later


def _ignore_signals() -> None:
    """Keeps the exit code while Python ends, for which it would restore the default handlers."""
    for number in CODES:
        signal.signal(number, signal.SIG_IGN)


def _on_signal(number: int, _frame: object) -> None:
    if not _now.received:
        _now.received = number
        if not _now.num_deferred:
            _raise_stopped()
    elif number == signal.SIGINT and not _now.watched:
        _raise_stopped()


def _raise_stopped() -> None:
    """Raises Stopped. In a command, stderr is silenced while the stack unwinds."""
    _now.ending = True
    if _now.watched:
        print_stopped()
        _silence_stderr()
        _end_children()
        if _is_importing("jax"):
            # An exception within the initialisation of jaxlib's C++ modules crashes the process.
            os._exit(exit_code())
        _exit_later(_now.received)
    raise Stopped


def _is_importing(name: str) -> bool:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def _read_signals(read_end: int) -> None:
    """Ends the process in a thread, whatever the main thread does."""
    first = 0
    while True:
        number = os.read(read_end, 1)[0]
        if number not in CODES:
            continue
        if first and number == signal.SIGINT:
            # Not for SIGTERM, which may come twice: to the group, and from the parent.
            _exit(first)
        first = first or number
        if not _now.num_deferred:
            _exit_later(first)


def _exit_later(number: int) -> None:
    timer = threading.Timer(PATIENCE, _exit, [number])
    timer.daemon = True
    timer.start()


def _exit(number: int) -> None:
    """Ends this process without unwinding."""
    _now.received = number
    print_stopped()
    _end_children()
    os._exit(exit_code())


def _silence_stderr() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def _end_children() -> None:
    if "multiprocessing.process" in sys.modules:
        from multiprocessing import active_children

        for child in active_children():
            child.kill()
