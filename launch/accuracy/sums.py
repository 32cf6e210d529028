"""The examples of configs/sums.py: every sum of a number up to 100 and one up to 10."""

import random
from pathlib import Path

from jaxprompt.files import make_folder, write_atomic

SIZES = {"train": 700, "dev": 100, "test": 200}


def write_sums(folder: str | Path) -> dict[str, int]:
    """Writes SIZES examples as CSV; no sum is in two splits. -> examples by split"""
    pairs = [(a, b) for a in range(1, 101) for b in range(1, 11)]
    random.Random(0).shuffle(pairs)
    make_folder(Path(folder))
    for split, size in SIZES.items():
        lines = [f"{a} + {b},{a + b}\n" for a, b in pairs[:size]]
        write_atomic(Path(folder) / f"{split}.csv", "".join(["sum,result\n", *lines]))
        pairs = pairs[size:]
    return SIZES
