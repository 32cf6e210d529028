"""Examples that cannot be encoded: which of many they are."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxprompt.data.batches.batching import EvalBatches
from jaxprompt.data.sources.records import Record
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.encoded import Split
from jaxprompt.errors import InputError, brief
from jaxprompt.models.generation import check_writing

if TYPE_CHECKING:
    from jaxprompt.assembly.pipeline import Scorer


def naming_the_example(encode: Callable[..., Split]) -> Callable[..., Split]:
    """Makes an InputError of `encode(scorer, examples)` show the text of the example at fault.

    That of a single example is left as it is: the caller knows which one it was.
    """

    @functools.wraps(encode)
    def named(scorer: "Scorer", examples: Sequence[Example], **options: Any) -> Split:
        try:
            return encode(scorer, examples, **options)
        except InputError:
            if len(examples) > 1:
                for example in examples:
                    _encode_alone(encode, scorer, example, options)
            raise  # each can be encoded by itself, or there is one

    return named


def _encode_alone(encode: Callable[..., Split], scorer: "Scorer", example: Example, options: Any):
    try:
        encode(scorer, [example], **options)
    except InputError as error:
        text = next(iter(example.fields.values()), "")
        raise InputError(f"example {brief(text)}: {error}") from error


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
