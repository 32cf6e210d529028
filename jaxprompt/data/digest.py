"""What a split of examples is, summed up: its size, its labels, and a digest of all it holds."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxprompt.data.tasks import Example

_PLAIN = Example._fields.index("entities")  # what follows counts where there are entities


def describe(examples: Sequence[Example], labels: Sequence[str]) -> dict[str, Any]:
    """Counts the examples and their labels by name, and hashes them in their order.

    The digest is the SHA-256 of fields, choices, label, references and entities of every example.
    """
    counts = Counter(example.label for example in examples)
    total = hashlib.sha256()
    for example in examples:
        held = example if example.entities else example[:_PLAIN]
        total.update(json.dumps(held, ensure_ascii=True).encode() + b"\n")
    return {
        "examples": len(examples),
        "labels": {name: counts[i] for i, name in enumerate(labels)},
        "digest": total.hexdigest(),
    }
