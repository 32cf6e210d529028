"""Summarises a split of examples: its size, its labels, and a digest of its contents."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence

from jaxprompt.config.documents import Document
from jaxprompt.data.tasks.task import Example

# Numbers of fields that are hashed: without entities and what follows them, and with them.
_NUM_PLAIN = Example._fields.index("entities")
_NUM_HASHED = Example._fields.index("is_moved")


@dataclasses.dataclass(frozen=True)
class SplitRecord(Document):
    """Summary of a split of examples."""

    examples: int
    labels: Mapping[str, int]  # examples of each class
    digest: str  # SHA-256


def summarize(examples: Sequence[Example], labels: Sequence[str]) -> SplitRecord:
    """Counts the examples and their labels by name, and hashes them in order.

    The digest is the SHA-256 of every example: its fields, choices and correct answer.
    """
    counts = Counter(example.label for example in examples)
    digest = hashlib.sha256()
    for example in examples:
        # Later fields are hashed only where they are used: runs recorded without them stay valid.
        fields = example[
            : _NUM_HASHED if example.entities or example.number is not None else _NUM_PLAIN
        ]
        digest.update(json.dumps(fields, ensure_ascii=True).encode() + b"\n")
    by_name = {name: counts[i] for i, name in enumerate(labels)}
    return SplitRecord(len(examples), by_name, digest.hexdigest())
