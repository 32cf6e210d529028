"""The rows that a file lists for each data seed."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxprompt.data.sources.files import read_file
from jaxprompt.data.tasks.cells import spelling, whole_number
from jaxprompt.errors import InputError


def read_listed(
    path: str | Path, seed: int, total: int, numbers: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Finds the examples of the rows that a file lists for `seed`.

    The file has lines like {"seed": 13, "train": [4, 2], "dev": [0]}, which index the `total` rows
    that were read as train.

    Args:
      path: path of the file.
      seed: the data seed.
      total: number of rows of train.
      numbers: row of each example; by default each row is one example.

    Returns:
      The examples of train, and those of dev.

    Raises:
      InputError: if a row is listed twice, or has no example.
    """
    examples_by_row: dict[int, list[int]] = {}
    for example, row_number in enumerate(range(total) if numbers is None else numbers):
        examples_by_row.setdefault(row_number, []).append(example)
    rows = read_file(path)
    for row_number, row in enumerate(rows):
        # By spelling: "13" and 13.0 are 13, and true is not 1.
        if whole_number(spelling(row.get("seed"))) == str(seed):
            return _examples_of(row, examples_by_row, total, rows.origin(row_number))
    seeds = ", ".join(str(row.get("seed")) for row in rows)
    raise InputError(f"{path}: there are no rows for seed {seed}; the file has seeds {seeds}")


def _examples_of(
    row: dict[str, Any], examples_by_row: dict[int, list[int]], total: int, where: str
) -> tuple[list[int], list[int]]:
    train: Any = row.get("train")
    dev: Any = row.get("dev")
    lists = isinstance(train, list) and isinstance(dev, list)
    if not lists or not train or not all(type(number) is int for number in train + dev):
        raise InputError(f"{where}: 'train' and 'dev' must be lists of row numbers")
    for number, count in Counter(train + dev).items():
        if number not in examples_by_row:
            raise InputError(
                f"{where}: row {number!r:.40} is not in train, whose rows count from 0 to "
                f"{total - 1}, except those excluded by their label or data.only; list other rows, "
                "or give the train file that this file was made for"
            )
        if count > 1:
            raise InputError(f"{where}: row {number} is listed {count} times; list it once")
    return (
        [example for number in train for example in examples_by_row[number]],
        [example for number in dev for example in examples_by_row[number]],
    )
