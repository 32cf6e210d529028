"""Predictions of a prompt on its backbone for a list of examples."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxprompt import tree
from jaxprompt.config.run import GenerateConfig
from jaxprompt.data.batches.batching import EvalBatches
from jaxprompt.data.sources.records import Record
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.encoded import count_cut
from jaxprompt.errors import InputError
from jaxprompt.models.generation import check_generation
from jaxprompt.models.scorer import Scorer, with_shared_prefix
from jaxprompt.parallel.sharding import Placement
from jaxprompt.training.evaluation import make_answering


class Answered(NamedTuple):
    """The predictions for some examples, and their metrics."""

    columns: list[dict[str, Any]]  # of each example, by column name
    measured: dict[str, float]  # metrics over examples with a known label, {} if there are none
    known: int  # number of examples with a known label
    cut: int  # number of texts that were truncated
    unmarked: int = 0  # number of examples with an entity that is not marked


def make_answers(
    scorer: Scorer, *, generation: GenerateConfig, placement: Placement
) -> Callable[[tree.Params, Sequence[Example]], Answered]:
    """Makes (params, examples) -> answers in order, compiled once per shape of a batch."""
    scorer = with_shared_prefix(scorer)
    head, at = scorer.head, scorer.layout
    answering = make_answering(head, placement, scorer.model, generation, scorer.tokenizer, at)

    def answer(params: tree.Params, examples: Sequence[Example]) -> Answered:
        split = scorer.encode(examples)
        batches = EvalBatches(split.rows, split.labels, scorer.layout)
        found = answering({}, dict(params), batches, len(split.rows))
        head.check_outputs(split.average(found))
        measured, known = scorer.measure_known(split, found)
        columns = list(scorer.answers(examples, split, found))
        unmarked = split.judged.unmarked if split.judged else 0
        return Answered(columns, measured, known, count_cut(split.by_example()), unmarked)

    return answer


def mark_errors(
    scorer: Scorer, records: Sequence[Record], generation: GenerateConfig | None = None
) -> list[Record]:
    """Replaces each example that cannot be encoded with the error.

    With `generation` also each example that leaves no room for generated text.
    """
    marked = []
    for record in records:
        try:
            if record.example:
                split = scorer.encode([record.example])
                batches = EvalBatches(split.rows, split.labels, scorer.layout)
                if generation is not None and scorer.head.WRITES:
                    size, ends = (
                        (generation.max_new_tokens, generation.num_beams),
                        scorer.layout.ends,
                    )
                    check_generation(scorer.model, next(iter(batches)), *size, ends=ends)
        except InputError as error:
            record = record._replace(example=None, error=f"{record.origin}: {error}")
        marked.append(record)
    return marked
