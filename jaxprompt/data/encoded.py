"""A split of a task, encoded: what batches are made of, and what answers are compared with."""

import zlib
from typing import Any, NamedTuple

import numpy as np

from jaxprompt.data.encode import Encoded


class Split(NamedTuple):
    """One split, encoded. A unit is what stands in one place of a batch: most often an example."""

    rows: list[list[Encoded]]  # units, K rows each
    labels: np.ndarray  # int32 [units] or [units, M], -1 = unknown
    counts: np.ndarray  # int32 [units], classes that the unit has: its choices, or all
    references: list[tuple[str, ...]]  # of each example, what a free text may say
    parts: Any = None  # a kind of answer's own: how examples were cut into units

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.references)

    def digest(self) -> str:
        """Sums up the encoded rows and labels: the same for the same data."""
        total = zlib.crc32(self.labels.tobytes())
        for row in (row for unit in self.rows for row in unit):
            parts = (row.ids, row.slot, row.label_pos) + ((row.decoder.ids,) if row.decoder else ())
            for part in parts:
                total = zlib.crc32(np.ascontiguousarray(part), total)
        return f"{len(self.rows)} examples, CRC {total:08x}"
