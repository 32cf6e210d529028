"""Splits long texts into windows that overlap; each token, or word, is read in exactly one."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxprompt.errors import InputError

USUAL = -1  # the default stride of each kind of head


class TextWindow(NamedTuple):
    """A range of the words or tokens of a text; part of it is read, the rest is context."""

    first: int
    last: int  # after the last
    read: int  # first that is read
    end: int  # after the last that is read


def check_stride(stride: int, max_len: int) -> None:
    """Raises InputError if windows would overlap by their whole length."""
    if stride >= max_len:
        raise InputError(
            f"head.stride={stride} must be below data.max_len={max_len}, the tokens of a window; "
            "reduce it, or remove it"
        )


def cut_windows(lengths: Sequence[int], room: int, stride: int) -> list[TextWindow]:
    """Splits a text into windows of at most `room` tokens, which overlap by about `stride`.

    They overlap by at most half a window; with more there would be one for nearly every token.
    `lengths` are the tokens of each word; a word that is longer than the room gets a window by
    itself, truncated. The first half of an overlap is read in the first window, the second half in
    the other.
    """
    windows: list[tuple[int, int]] = []
    stride = min(stride, room // 2)
    first, count = 0, len(lengths)
    while True:
        last, num_tokens = first, 0
        while last < count and (num_tokens + lengths[last] <= room or last == first):
            num_tokens += lengths[last]
            last += 1
        windows.append((first, last))
        if last == count:
            break
        overlap, start = 0, last
        while start - 1 > first and overlap + lengths[start - 1] <= stride:
            start -= 1
            overlap += lengths[start]
        # The overlap must leave room for the first word that is not in this window.
        while start < last and sum(lengths[start:last]) + lengths[last] > room:
            start += 1
        first = start
    read_windows = []
    for number, (first, last) in enumerate(windows):
        # The middle of the overlap: each word is read in the window with more context.
        read = 0 if number == 0 else (first + windows[number - 1][1] + 1) // 2
        end = count if number + 1 == len(windows) else (windows[number + 1][0] + last + 1) // 2
        read_windows.append(TextWindow(first, last, read, end))
    return read_windows
