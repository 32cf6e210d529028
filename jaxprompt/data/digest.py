"""What a split of examples is, summed up: its size, its labels, and a digest of all it holds."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxprompt.data.tasks import Example


def describe(examples: Sequence[Example], labels: Sequence[str]) -> dict[str, Any]:
    """Counts the examples and their labels by name, and hashes them in their order.

    The digest is the SHA-256 of fields, choices, label and references of every example.
    """
    counts = Counter(example.label for example in examples)
    total = hashlib.sha256()
    for example in examples:
        total.update(json.dumps(example, ensure_ascii=True).encode() + b"\n")
    return {
        "examples": len(examples),
        "labels": {name: counts[i] for i, name in enumerate(labels)},
        "digest": total.hexdigest(),
    }
