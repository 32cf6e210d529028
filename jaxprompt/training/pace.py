"""Progress lines for long tasks, one every few seconds, and how times and scores are shown."""

import time
from collections.abc import Callable

REPORT_SECONDS = 10.0  # seconds between two reports


class ProgressReporter:
    """Reports how much work is done, the speed, and the time left."""

    def __init__(
        self,
        report: Callable[[str], None],
        activity: str,
        total: int | None,
        unit: str,
        done: int = 0,
    ):
        """`done` were done before and do not count for the speed; `total` is None if unknown."""
        self._report, self._activity, self._total, self._unit = report, activity, total, unit
        self._first = self._done = done
        self._start = self._last_report = time.monotonic()

    def add(self, count: int) -> None:
        """Adds `count`; reports if the last report is more than `REPORT_SECONDS` seconds old."""
        self._done += count
        now = time.monotonic()
        if now - self._last_report <= REPORT_SECONDS or self._done == self._first:
            return
        self._last_report = now
        speed = (self._done - self._first) / (now - self._start)
        speed_text = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
        total, left = "", ""
        if self._total is not None:
            total = f"/{self._total:,}"
            left = f", {format_seconds((self._total - self._done) / speed)} left"
        self._report(
            f"{self._activity} {self._done:,}{total} {self._unit}, {speed_text} a second{left}"
        )


def format_seconds(seconds: float) -> str:
    """Formats seconds as minutes and seconds, e.g. 2:05, from an hour on with hours, 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_score(value: float) -> str:
    """Formats a loss or a score, e.g. 0.9120, 8.228e+06 or nan."""
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.3e}"
