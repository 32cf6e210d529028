"""Logs of a run: metrics.jsonl, an optional tracker, and progress on stderr.

A line of metrics.jsonl is one JSON object, {"step": 100, "loss": 0.25, "time": {"seconds": 3.1}}.
Numbers are written so that they read back exactly; NaN and the infinities, which JSON lacks, are
the strings "NaN", "Infinity" and "-Infinity", which float() reads. Wall-clock values are only under
"time": without that key the lines of two equal runs are equal.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxprompt.errors import InputError, escape
from jaxprompt.files import (
    dumps,
    make_folder,
    open_regular,
    parse_json,
    read_bytes,
    to_plain,
    write_atomic,
    write_error,
)
from jaxprompt.training.pace import format_score, format_seconds
from jaxprompt.training.trackers import open_tracker

_REFRESH = 0.5  # seconds between two looks at the status


class RunLog:
    """The log of one run in a workdir. One process writes; the others pass `enabled=False`.

    A terminal shows a status line below the lines that stay. Elsewhere the status is printed as a
    line after `every` seconds without one.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        tracker: str = "tensorboard",
        enabled: bool = True,
        total: int = 0,
        steps_per_epoch: int = 1,
        every: float = 30.0,
    ):
        """Opens the log.

        Args:
          workdir: directory of the run.
          tracker: name of a tracker, see `trackers`.
          enabled: whether this process writes.
          total: number of steps; 0 for a log without a status.
          steps_per_epoch: steps of an epoch.
          every: seconds between status lines where stderr is not a terminal.

        Raises:
          InputError: the tracker cannot be opened.
        """
        folder = make_folder(workdir)
        self._path = folder / "metrics.jsonl"
        self._enabled = enabled
        self._terminal = enabled and _terminal_width() > 0
        self._total, self._steps_per_epoch, self._every = total, steps_per_epoch, every
        self._first_step = self._newest_step = 0  # the speed is measured between these steps
        self._first_time: float | None = None  # their ends
        self._newest_time = 0.0
        self._newest_loss = ""  # of the newest logged step
        # Returns the newest step that the device has finished, None if there is none. By default
        # every step passed to `progress` is finished.
        self.finished_step: Callable[[], int | None] | None = None
        self._reporter: threading.Thread | None = None
        self._activity = "preparing the first step"  # what is done between two steps
        self._activity_time = self._last_line = time.monotonic()  # its start, and the newest line
        self._printing = threading.Lock()
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
            with open_regular(self._path, "ab") as file:
                # The whole line at once, so that a kill can cut off only the last line.
                file.write(dumps(record).encode() + b"\n")
        except OSError as error:
            raise write_error(self._path, error) from error
        self._tracker.write(int(step), values)
        if "dev" in values:
            self._tracker.flush()
        if "loss" in values:
            self._newest_loss = f"loss {format_score(float(values['loss']))} (step {step})"

    def evaluated(self, step: int, loss: float, metric: str, score: float, remark: str) -> None:
        """Prints the line of an evaluation; `loss` is that of the step, `remark` may be ""."""
        self._newest_time = time.monotonic()  # the time left has evaluations, too
        scores = f"loss {format_score(loss)}", f"dev {metric} {format_score(score)}"
        self.info("  ".join(filter(None, [*self._position(step), *scores, remark])))

    def progress(self, step: int) -> None:
        """Updates the status: newest finished step, speed and time left.

        A step before the newest one belongs to another run, which restarts the measured speed.
        """
        finished = step if self.finished_step is None else self.finished_step()
        if finished is None:
            return
        step, now, self._activity = finished, time.monotonic(), ""
        if self._first_time is None or step < self._newest_step:
            # The first step compiles; the speed is measured from its end.
            self._first_time, self._first_step = now, step
        self._newest_time, self._newest_step = now, step

    @contextlib.contextmanager
    def activity(self, text: str) -> Iterator[None]:
        """Shows what a block does, and for how long, instead of the newest step."""
        self._activity_time, self._activity = time.monotonic(), text
        yield
        self._activity = ""

    def info(self, text: str) -> None:
        """Prints lines to stderr, above the status line."""
        if not self._enabled:
            return
        with self._printing:
            self._show("")
            print(escape(text), file=sys.stderr, flush=True)
            self._last_line = time.monotonic()

    def close(self) -> None:
        """Closes the tracker and removes the status line. Raises InputError on a full disk."""
        self._closed.set()
        if self._reporter is not None:
            self._reporter.join()
            self._show("")
        self._tracker.close()

    def __enter__(self) -> "RunLog":
        """Returns itself; the log closes when the block ends."""
        if self._total and self._enabled:
            # A thread, because a step, a compilation or an evaluation may take minutes.
            self._reporter = threading.Thread(target=self._report, daemon=True)
            self._reporter.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes the log; an error of the block takes precedence."""
        try:
            self.close()
        except InputError:
            if kind is None:
                raise

    def _report(self) -> None:
        while not self._closed.wait(_REFRESH):
            if self._terminal:
                with self._printing:
                    self._show(self._status())
            elif time.monotonic() - self._last_line >= self._every:
                self.info(self._status())

    def _show(self, status: str) -> None:
        """Replaces the status line of the terminal, cut to its width."""
        if self._terminal:
            # \r: to the start of the line, \x1b[K: erase it.
            sys.stderr.write(f"\r\x1b[K{escape(status)[: max(_terminal_width() - 1, 0)]}")
            sys.stderr.flush()

    def _status(self) -> str:
        if activity := self._activity:
            return f"{activity} ({_since(self._activity_time)})"
        speed = self._speed()
        speed_text = f"{speed:.3g} steps/s" if speed else ""
        parts = [*self._position(self._newest_step), speed_text, self._newest_loss]
        return "  ".join(filter(None, parts))

    def _position(self, step: int) -> list[str]:
        """Returns the step, its epoch and, once the speed is known, the time left."""
        last_epoch = f"{self._total / self._steps_per_epoch:.1f}"
        epoch = f"{step / self._steps_per_epoch:.1f}"
        parts = [
            f"step {step:>{len(str(self._total))}}/{self._total}",
            f"epoch {epoch:>{len(last_epoch)}}",
        ]
        if speed := self._speed():
            parts.append(f"{format_seconds((self._total - step) / speed):>5} left")
        return parts

    def _speed(self) -> float:
        """Returns the steps per second, 0 if it is unknown."""
        seconds = self._newest_time - (self._first_time or 0.0)
        return (self._newest_step - self._first_step) / seconds if seconds else 0.0


def _since(moment: float) -> str:
    return format_seconds(time.monotonic() - moment)


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads the log records of a run, [] if there are none yet; skips an incomplete last line.

    Raises InputError for any other invalid line, and for what is no regular file.
    """
    path = Path(workdir) / "metrics.jsonl"
    try:
        lines = read_bytes(path).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); delete it") from error
    records = []
    for number, line in enumerate(lines, 1):
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


def _terminal_width() -> int:
    """Returns the columns of the terminal at stderr; 0 if it cannot show a status line."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # not a file, or not a terminal
        return 0
    # Both sizes are 0 if they were never set; a dumb terminal cannot erase a line.
    return size.columns if size.lines and os.environ.get("TERM") != "dumb" else 0
