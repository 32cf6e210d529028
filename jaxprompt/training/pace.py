"""Progress lines for long tasks, one every few seconds."""

import time
from collections.abc import Callable

REPORT_SECONDS = 10.0  # seconds between two reports


class ProgressReporter:
    """Reports how much work is done, the speed, and the time left."""

    def __init__(
        self, say: Callable[[str], None], doing: str, total: int, unit: str, done: int = 0
    ):
        """`done` of `total` were done before and do not count for the speed."""
        self._say, self._doing, self._total, self._unit = say, doing, total, unit
        self._first = self._done = done
        self._start = self._said = time.monotonic()

    def add(self, count: int) -> None:
        """Adds `count`; reports if the last report is more than `REPORT_SECONDS` seconds old."""
        self._done += count
        now = time.monotonic()
        if now - self._said <= REPORT_SECONDS or self._done == self._first:
            return
        self._said = now
        rate = (self._done - self._first) / (now - self._start)
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        left = format_seconds((self._total - self._done) / rate)
        self._say(
            f"{self._doing} {self._done:,}/{self._total:,} {self._unit}, {speed} a second, "
            f"{left} left"
        )


def format_seconds(seconds: float) -> str:
    """Formats seconds as minutes and seconds, e.g. 2:05."""
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes}:{left:02d}"
