"""Examples that cannot be encoded: which of many they are."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxprompt.data.batching import EvalBatches
from jaxprompt.data.encoded import Split
from jaxprompt.data.records import Record
from jaxprompt.data.tasks import Example
from jaxprompt.errors import InputError

if TYPE_CHECKING:
    from jaxprompt.assembly.pipeline import Scorer

_SHOWN = 60  # characters of an example's text


def naming_the_example(encode: Callable[..., Split]) -> Callable[..., Split]:
    """Makes an InputError of `encode(scorer, examples)` tell the text of the example at fault.

    That of a single example is left as it is: who gave it knows where it stands.
    """

    @functools.wraps(encode)
    def named(scorer: "Scorer", examples: Sequence[Example], **how: Any) -> Split:
        try:
            return encode(scorer, examples, **how)
        except InputError as error:
            if len(examples) == 1:
                raise
            for example in examples:
                try:
                    encode(scorer, [example], **how)
                except InputError as own:
                    text = next(iter(example.fields.values()), "")
                    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
                    raise InputError(f"example {shown!r}: {own}") from error
            raise

    return named


def with_errors(scorer: "Scorer", records: Sequence[Record]) -> list[Record]:
    """Puts the reason in the place of each example that cannot be encoded by itself."""
    found = []
    for record in records:
        try:
            if record.example:
                split = scorer.encode([record.example])
                EvalBatches(split.rows, split.labels, scorer.layout)
        except InputError as error:
            record = record._replace(example=None, error=f"{record.origin}: {error}")
        found.append(record)
    return found
