"""Windows of long texts: every word is read once, in a window that has room for it."""

import random

import pytest

from jaxprompt.data.text.windows import USUAL, TextWindow, check_stride, cut_windows
from jaxprompt.errors import InputError


def test_every_word_is_read_once_and_windows_have_room():
    rng = random.Random(0)
    for _ in range(3000):
        lengths = [rng.randint(1, 6) for _ in range(rng.randint(1, 30))]
        room, stride = rng.randint(1, 20), rng.randint(0, 20)
        windows = cut_windows(lengths, room, stride)
        read = [word for window in windows for word in range(window.read, window.end)]
        assert read == list(range(len(lengths))), (lengths, room, stride)
        for window in windows:
            assert window.first <= window.read < window.end <= window.last
            alone = window.last - window.first == 1
            assert alone or sum(lengths[window.first : window.last]) <= room
        for window, after in zip(windows, windows[1:], strict=False):
            assert sum(lengths[after.first : window.last]) <= stride


def test_what_two_windows_share_is_read_by_halves():
    actual = cut_windows([1] * 12, 8, 4)
    assert actual == [TextWindow(0, 8, 0, 6), TextWindow(4, 12, 6, 12)]
    assert cut_windows([1] * 8, 8, 4) == [TextWindow(0, 8, 0, 8)]
    assert cut_windows([2, 9, 2], 4, 2) == [
        TextWindow(0, 1, 0, 1), TextWindow(1, 2, 1, 2), TextWindow(2, 3, 2, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("stride", [50, 99, 100, 5000])
def test_windows_share_half_at_most(stride):
    """With the default stride and short windows there was one for nearly every token."""
    windows = cut_windows([1] * 500, 100, stride)
    assert [window.first for window in windows] == list(range(0, 401, 50))
    assert [w.read for w in windows[1:]] == [w.end for w in windows[:-1]]


def test_windows_that_would_share_all_are_refused():
    for stride in (24, 128):
        with pytest.raises(InputError, match=f"head.stride={stride} .* data.max_len=24,"):
            check_stride(stride, 24)
    for stride in (23, 0, USUAL):
        check_stride(stride, 24)
