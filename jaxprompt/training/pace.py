"""How far a long count is, told every few seconds."""

import time
from collections.abc import Callable

PAUSE = 10.0  # seconds between two reports


class Pace:
    """Tells of work that is counted: how much is done, how fast, and how long the rest takes."""

    def __init__(
        self, say: Callable[[str], None], doing: str, total: int, unit: str, done: int = 0
    ):
        """`done` of `total` were there before, and do not count in the rate."""
        self._say, self._doing, self._total, self._unit = say, doing, total, unit
        self._first = self._done = done
        self._start = self._said = time.monotonic()

    def add(self, count: int) -> None:
        """Takes `count` more as done; says a line where the last one is `PAUSE` seconds old."""
        self._done += count
        now = time.monotonic()
        if now - self._said <= PAUSE or self._done == self._first:
            return
        self._said = now
        rate = (self._done - self._first) / (now - self._start)
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        minutes, seconds = divmod(round((self._total - self._done) / rate), 60)
        self._say(
            f"{self._doing} {self._done:,}/{self._total:,} {self._unit}, {speed} a second, "
            f"{minutes}:{seconds:02d} left"
        )
