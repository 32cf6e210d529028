"""Logs of a run: metrics.jsonl, an optional tracker, and progress on stderr.

A line of metrics.jsonl is one JSON object, {"step": 100, "loss": 0.25, "time": {"seconds": 3.1}}.
Numbers are written so that they read back exactly; NaN and the infinities, which JSON lacks, are
the strings "NaN", "Infinity" and "-Infinity", which float() reads. Wall-clock values are only under
"time": without that key the lines of two equal runs are equal.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxprompt.errors import InputError, escape
from jaxprompt.files import dumps, make_folder, parse_json, to_plain, write_atomic, write_error
from jaxprompt.training.pace import clock
from jaxprompt.training.trackers import open_tracker


class RunLog:
    """The log of one run in a workdir. One process writes; the others pass `enabled=False`."""

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        tracker: str = "tensorboard",
        terminal: bool | None = None,
        enabled: bool = True,
        total: int | None = None,
        every: float = 30.0,
    ):
        """Opens the log.

        Args:
          workdir: directory of the run.
          tracker: name of a tracker, see `trackers`.
          terminal: True for a progress bar, False for plain lines, one per evaluation and one after
            `every` seconds without a line. By default True if stderr is a terminal.
          enabled: whether this process writes.
          total: number of steps, for the time left.
          every: seconds between plain lines.

        Raises:
          InputError: the tracker cannot be opened.
        """
        folder = make_folder(workdir)
        self._path = folder / "metrics.jsonl"
        self._enabled = enabled
        self._terminal = _is_terminal() if terminal is None else terminal
        self._total, self._every = total, every
        self._first = 0  # step that the rate counts from
        self._started: float | None = None  # and the time
        self._newest = 0  # step that is done
        self._ended: float | None = None  # when the last one was
        self._shown: dict[str, Any] = {}  # newest dev, loss and learning rate
        # Tells the newest step that the device has ended, None = none yet. Without it a step is
        # done when it is noted.
        self.done: Callable[[], int | None] | None = None
        self._bar: Any = None  # tqdm's
        self._beat: threading.Thread | None = None
        self._opened = self._told = time.monotonic()  # when the newest line was printed
        self._closed = threading.Event()
        self._tracker = open_tracker(tracker, folder, enabled=enabled)

    def resume(self, step: int) -> None:
        """Drops the records after `step` (-1: all) and an incomplete last line.

        Call it before the first write. Raises InputError for any other invalid line.
        """
        self._tracker.resume(step)
        if not self._enabled or not self._path.exists():
            return
        *lines, _torn = self._path.read_bytes().split(b"\n")
        kept = []
        for number, line in enumerate(lines, 1):
            try:
                if parse_json(line)["step"] <= step:
                    kept.append(line + b"\n")
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(
                    f"{self._path}:{number} is not a valid log record ({error}); "
                    "fix or delete the file, or use another workdir"
                ) from error
        write_atomic(self._path, b"".join(kept))

    def write(self, step: int, **values: Any) -> None:
        """Appends one record: numbers, strings, and dicts and lists of them; "time" is a dict."""
        if not self._enabled:
            return
        record = {"step": int(step), **{name: to_plain(value) for name, value in values.items()}}
        try:
            with open(self._path, "ab") as file:
                # A whole line at once, so that a kill tears the last line at most.
                file.write(dumps(record).encode() + b"\n")
        except OSError as error:
            raise write_error(self._path, error) from error
        self._tracker.write(int(step), values)
        if "dev" in values:
            self._tracker.flush()
        self.show(**{name: record[name] for name in ("dev", "loss", "lr") if name in record})

    def show(self, **values: Any) -> None:
        """Updates the values that the progress shows; prints a line for a new dev score."""
        for name, value in values.items():
            if isinstance(value, dict) and name == "lr":
                value = " ".join(f"{part} {rate:.4g}" for part, rate in value.items())
            elif isinstance(value, dict):  # of metrics the first, the task's own, is shown
                value = next(iter(value.values()))
            self._shown[name] = value
        if "dev" in values and self._started is not None and not self._terminal:
            self._tell()

    def progress(self, step: int) -> None:
        """Updates the progress: newest finished step, speed, time left and values.

        A step before the newest one belongs to another run, which restarts the measured speed.
        """
        done = step if self.done is None else self.done()
        if done is None or not self._enabled:
            return
        step = done
        if self._started is None or step < self._newest:
            # The first step compiles; the rate counts from its end.
            self._started, self._first = time.monotonic(), step
            if self._bar is not None:  # of another start, which its rate counts from
                self._bar.close()
                self._bar = None
        self._newest = step
        self._ended = time.monotonic() if step == self._total else None
        if self._terminal:
            self._update_bar(step)

    def say(self, text: str) -> None:
        """Prints a line to stderr, above the progress bar if there is one."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.write(escape(text), file=sys.stderr)
        else:
            print(escape(text), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Closes the tracker and the progress bar. Raises InputError on a full disk."""
        self._closed.set()
        if self._beat is not None:
            self._beat.join()
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
        self._tracker.close()

    def __enter__(self) -> "RunLog":
        """Returns itself; the log closes when the block ends."""
        if self._total and self._enabled and not self._terminal:
            self._beat = threading.Thread(target=self._tell_regularly, daemon=True)
            self._beat.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes the log; an error of the block takes precedence."""
        try:
            self.close()
        except InputError:
            if kind is None:
                raise

    def _update_bar(self, step: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total, initial=step, unit="step", file=sys.stderr, dynamic_ncols=True
            )
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update(step - self._bar.n)

    def _tell(self, line: str | None = None) -> None:
        self._told = time.monotonic()
        print(escape(line or self._line(self._newest)), file=sys.stderr, flush=True)

    def _tell_regularly(self) -> None:
        # In a thread: a step, a compilation or an evaluation may take minutes.
        wait = self._every
        while not self._closed.wait(wait):
            wait = self._told + self._every - time.monotonic()
            if wait <= 0:
                ended, line = self._ended, None
                if ended is not None:
                    line = f"evaluating after step {self._total} ({_since(ended)})"
                self._tell(line)
                wait = self._every

    def _line(self, step: int) -> str:
        if self._started is None:
            waited = _since(self._opened)
            return f"still preparing or compiling the first of {self._total} steps ({waited})"
        parts = [f"step {step}/{self._total}" if self._total else f"step {step}"]
        seconds = (self._ended or time.monotonic()) - self._started
        if step > self._first and seconds > 0:
            rate = (step - self._first) / seconds
            parts.append(f"{rate:.3g} steps/s")
            if self._total:
                parts.append(f"{clock((self._total - step) / rate)} left")
        for name, value in self._shown.items():
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        return "  ".join(parts)


def _since(moment: float) -> str:
    return clock(time.monotonic() - moment)


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads the log records of a run, [] if there are none yet; skips an incomplete last line.

    Raises InputError for any other invalid line.
    """
    path = Path(workdir) / "metrics.jsonl"
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = parse_json(line)
            record["step"] + 0  # a number, of an object
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{path}:{number} is not a valid log record ({error}); fix or delete the file"
            ) from error
        records.append(record)
    return records


def _is_terminal() -> bool:
    """Returns whether stderr is a terminal with a size."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # no file, or one that is no terminal
        return False
    return size.columns > 0 and size.lines > 0  # both are 0 where nobody has set them
