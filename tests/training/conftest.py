"""A clock that a test sets."""

import pytest


@pytest.fixture
def clock(monkeypatch):
    """The seconds of time.monotonic, in a list of one."""
    seconds = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])
    return seconds
