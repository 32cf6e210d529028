"""Splits long texts into windows that overlap; each token, or word, is read in exactly one."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxprompt.errors import InputError

USUAL = -1  # a stride that each kind of answer chooses itself


class TextWindow(NamedTuple):
    """A part of a text, in words or tokens; some of these are read, the others are context."""

    first: int
    last: int  # behind the last
    read: int  # first that is read
    end: int  # behind the last that is read


def check_stride(stride: int, max_len: int) -> None:
    """Raises InputError if windows would overlap by their whole length."""
    if stride >= max_len:
        raise InputError(
            f"head.stride={stride} must be below data.max_len={max_len}, the tokens of a window; "
            "reduce it, or remove it"
        )


def cut_windows(lengths: Sequence[int], room: int, stride: int) -> list[TextWindow]:
    """Splits a text into windows of at most `room` tokens, which overlap by about `stride`.

    They overlap by at most half a window; otherwise there would be one for nearly every token.
    `lengths` are the tokens of each word; a word that is longer than the room gets a window by
    itself, truncated. The first half of an overlap is read in the first window, the second half in
    the other.
    """
    windows: list[tuple[int, int]] = []
    stride = min(stride, room // 2)
    first, count = 0, len(lengths)
    while True:
        last, used = first, 0
        while last < count and (used + lengths[last] <= room or last == first):
            used += lengths[last]
            last += 1
        windows.append((first, last))
        if last == count:
            break
        shared, start = 0, last
        while start - 1 > first and shared + lengths[start - 1] <= stride:
            start -= 1
            shared += lengths[start]
        # What the next begins with must leave room for a word that is not in this one.
        while start < last and sum(lengths[start:last]) + lengths[last] > room:
            start += 1
        first = start
    found = []
    for number, (first, last) in enumerate(windows):
        # The middle of what two windows share: each word is read where it has more context.
        read = 0 if number == 0 else (first + windows[number - 1][1] + 1) // 2
        end = count if number + 1 == len(windows) else (windows[number + 1][0] + last + 1) // 2
        found.append(TextWindow(first, last, read, end))
    return found
