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
from jaxprompt.training.pace import format_seconds
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
        self._first_step = 0  # the speed is measured from this step
        self._start_time: float | None = None  # and this time
        self._newest_step = 0  # newest finished step
        self._end_time: float | None = None  # of the last step
        self._shown: dict[str, Any] = {}  # newest dev, loss and learning rate
        # Returns the newest step that the device has finished, None if there is none. By default
        # every step passed to `progress` is finished.
        self.finished_step: Callable[[], int | None] | None = None
        self._bar: Any = None  # tqdm's
        self._reporter: threading.Thread | None = None
        self._open_time = self._last_line = time.monotonic()  # when the newest line was printed
        self._closed = threading.Event()
        self._tracker = open_tracker(tracker, folder, enabled=enabled)

    def resume(self, step: int) -> None:
        """Drops the records after `step` (-1: all) and an incomplete last line.

        Call it before the first write. Raises InputError for any other invalid line.
        """
        self._tracker.resume(step)
        if self._enabled and self._path.exists():
            records = [x for x in read_metrics(self._path.parent) if x["step"] <= step]
            write_atomic(self._path, "".join(f"{dumps(record)}\n" for record in records))

    def write(self, step: int, **values: Any) -> None:
        """Appends one record: numbers, strings, and dicts and lists of them; "time" is a dict."""
        if not self._enabled:
            return
        record = {"step": int(step), **{name: to_plain(value) for name, value in values.items()}}
        try:
            with open(self._path, "ab") as file:
                # The whole line at once, so that a kill can cut off only the last line.
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
                value = " ".join(f"{part} {lr:.4g}" for part, lr in value.items())
            elif isinstance(value, dict):  # the first metric is that of the task
                value = next(iter(value.values()))
            self._shown[name] = value
        if "dev" in values and self._start_time is not None and not self._terminal:
            self._print_status()

    def progress(self, step: int) -> None:
        """Updates the progress: newest finished step, speed, time left and values.

        A step before the newest one belongs to another run, which restarts the measured speed.
        """
        finished = step if self.finished_step is None else self.finished_step()
        if finished is None or not self._enabled:
            return
        step = finished
        if self._start_time is None or step < self._newest_step:
            # The first step compiles; the speed is measured from its end.
            self._start_time, self._first_step = time.monotonic(), step
            self._close_bar()  # it measures the speed of another run
        self._newest_step = step
        self._end_time = time.monotonic() if step == self._total else None
        if self._terminal:
            self._update_bar(step)

    def info(self, text: str) -> None:
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
        if self._reporter is not None:
            self._reporter.join()
        self._close_bar()
        self._tracker.close()

    def __enter__(self) -> "RunLog":
        """Returns itself; the log closes when the block ends."""
        if self._total and self._enabled and not self._terminal:
            self._reporter = threading.Thread(target=self._print_regularly, daemon=True)
            self._reporter.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes the log; an error of the block takes precedence."""
        try:
            self.close()
        except InputError:
            if kind is None:
                raise

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _update_bar(self, step: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total, initial=step, unit="step", file=sys.stderr, dynamic_ncols=True
            )
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update(step - self._bar.n)

    def _print_status(self, line: str | None = None) -> None:
        self._last_line = time.monotonic()
        print(escape(line or self._status(self._newest_step)), file=sys.stderr, flush=True)

    def _print_regularly(self) -> None:
        # In a thread, because a step, a compilation or an evaluation may take minutes.
        wait = self._every
        while not self._closed.wait(wait):
            wait = self._last_line + self._every - time.monotonic()
            if wait <= 0:
                end_time, line = self._end_time, None
                if end_time is not None:
                    line = f"evaluating after step {self._total} ({_since(end_time)})"
                self._print_status(line)
                wait = self._every

    def _status(self, step: int) -> str:
        if self._start_time is None:
            duration = _since(self._open_time)
            return f"still preparing or compiling the first of {self._total} steps ({duration})"
        parts = [f"step {step}/{self._total}" if self._total else f"step {step}"]
        seconds = (self._end_time or time.monotonic()) - self._start_time
        if step > self._first_step and seconds > 0:
            speed = (step - self._first_step) / seconds
            parts.append(f"{speed:.3g} steps/s")
            if self._total:
                parts.append(f"{format_seconds((self._total - step) / speed)} left")
        for name, value in self._shown.items():
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        return "  ".join(parts)


def _since(moment: float) -> str:
    return format_seconds(time.monotonic() - moment)


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads the log records of a run, [] if there are none yet; skips an incomplete last line.

    Raises InputError for any other invalid line, and for what is not a file.
    """
    path = Path(workdir) / "metrics.jsonl"
    if not path.exists():
        return []
    if not path.is_file():  # reading from a pipe would wait
        raise InputError(f"{path} is not a file; delete it")
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = parse_json(line)
            record["step"] + 0  # raises if it is not a number
            record.get("dev", {}).items()  # raises if these are not scores
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(
                f"{path}:{number} is not a valid log record ({error}); fix or delete the file"
            ) from error
        records.append(record)
    return records


def _is_terminal() -> bool:
    """Returns whether stderr is a terminal with a size."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # not a file, or not a terminal
        return False
    return size.columns > 0 and size.lines > 0  # both are 0 if they were never set
