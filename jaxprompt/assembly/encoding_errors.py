"""Examples that cannot be encoded: which of many they are."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxprompt.data.batches.batching import EvalBatches
from jaxprompt.data.sources.records import Record
from jaxprompt.errors import InputError
from jaxprompt.models.generation import check_writing

if TYPE_CHECKING:
    from jaxprompt.models.scorer import Scorer


def mark_errors(
    scorer: "Scorer", records: Sequence[Record], how: Mapping[str, Any] | None = None
) -> list[Record]:
    """Replaces each example that cannot be encoded by itself with the reason.

    By `how`, the `generate` block of a card, so is one that leaves no room for a text to be
    written.
    """
    marked = []
    for record in records:
        try:
            if record.example:
                split = scorer.encode([record.example])
                batches = EvalBatches(split.rows, split.labels, scorer.layout)
                if how is not None and scorer.head.WRITES:
                    size, ends = (how["max_new"], how["beams"]), scorer.layout.ends
                    check_writing(scorer.model, next(iter(batches)), *size, ends=ends)
        except InputError as error:
            record = record._replace(example=None, error=f"{record.origin}: {error}")
        marked.append(record)
    return marked
