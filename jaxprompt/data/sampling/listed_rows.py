"""The rows that a file lists for each data seed."""

from collections import Counter
from collections.abc import Container, Sequence
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
            where = rows.origin(row_number)
            train, dev = (
                _row_numbers(row, part, total, examples_by_row, where) for part in ("train", "dev")
            )
            if not train:
                raise InputError(f"{where}: 'train' lists no rows; list at least 1")
            if shared := sorted(set(train) & set(dev)):
                raise InputError(
                    f"{where}: train and dev both list row {shared[0]}; remove it from one of them"
                )
            return [i for n in train for i in examples_by_row[n]], [
                i for n in dev for i in examples_by_row[n]
            ]
    seeds = ", ".join(str(row.get("seed")) for row in rows)
    raise InputError(f"{path}: there are no rows for seed {seed}; the file has seeds {seeds}")


def _row_numbers(
    row: dict[str, Any], part: str, total: int, rows_with_examples: Container[int], where: str
) -> list[int]:
    numbers = row.get(part)
    if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
        raise InputError(f"{where}: {part!r} must be a list of row numbers")
    for n in numbers:
        if not 0 <= n < total:
            raise InputError(
                f"{where}: {part} lists row {n}, but rows count from 0 to {total - 1}; this file "
                "was made for a different train file"
            )
        if n not in rows_with_examples:
            raise InputError(
                f"{where}: {part} lists row {n}, which is excluded from train because of its label "
                "or data.only; list another row"
            )
    if len(set(numbers)) < len(numbers):
        twice = next(n for n, count in Counter(numbers).items() if count > 1)
        raise InputError(f"{where}: {part} lists row {twice} twice; remove one")
    return numbers
