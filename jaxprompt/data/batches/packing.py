"""Packs encoded examples: several in each row, each a document that sees only itself."""

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxprompt.data.text.encoded import Encoded
from jaxprompt.errors import InputError


def plan_rows(lengths: Sequence[int] | np.ndarray, room: int) -> list[list[int]]:
    """Divides examples into rows of at most `room` tokens: best fit, the longest first.

    Depends only on the lengths. An example longer than `room` fills a row alone.

    Returns:
      The examples of each row, in order; rows in the order of their first example.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # by the room that is left
    free: list[int] = []  # the keys of `open_rows`, ascending
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[index])
        at = bisect.bisect_left(free, length)
        if at == len(free):
            row, left = len(rows), max(room - length, 0)
            rows.append([index])
        else:
            left = free[at]
            row = open_rows[left].pop()
            if not open_rows[left]:
                del open_rows[left], free[at]
            rows[row].append(index)
            left -= length
        if left not in open_rows:
            open_rows[left] = []
            bisect.insort(free, left)
        open_rows[left].append(row)
    return sorted(map(sorted, rows))


def pack_rows(rows: Sequence[Sequence[Encoded]], room: int) -> list[list[Encoded]]:
    """Packs examples of one row each; see `plan_rows`.

    Raises InputError for examples of several rows, or with a decoder.
    """
    if any(len(example) > 1 or example[0].decoder is not None for example in rows):
        raise InputError(
            "examples with several inputs, or with the input of a decoder, cannot be packed; set "
            "data.packed=False"
        )
    documents = [row for (row,) in rows]
    plan = plan_rows([len(row.ids) for row in documents], room)
    return [[_join([documents[i] for i in indices])] for indices in plan]


def _join(documents: Sequence[Encoded]) -> Encoded:
    """Joins documents to one row; positions stay those in a document."""
    lengths = [len(document.ids) for document in documents]
    starts = np.cumsum([0, *lengths[:-1]])
    label_pos = [x.label_pos + start for x, start in zip(documents, starts, strict=True)]
    targets = [x.targets for x in documents if x.targets is not None]
    names = ("ids", "slot", "types", "roles", "positions")
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(x, name) for x in documents]) for name in names
    }
    return Encoded(
        **joined,
        label_pos=np.concatenate(label_pos).astype(np.int32),
        targets=np.concatenate(targets) if targets else None,
        segments=np.repeat(np.arange(1, 1 + len(documents), dtype=np.int32), lengths),
        cut=sum(document.cut for document in documents),
    )
