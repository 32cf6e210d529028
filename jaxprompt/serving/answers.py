"""Predictions of a prompt on its backbone for a list of examples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxprompt import tree
from jaxprompt.config.run import GenerateConfig
from jaxprompt.data.batches.batching import EvalBatches
from jaxprompt.data.sources.records import Record
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.encoded import Predictions, Split, count_cut
from jaxprompt.errors import InputError
from jaxprompt.heads import Labelled
from jaxprompt.models.generation import check_generation
from jaxprompt.models.scorer import Scorer, with_shared_prefix
from jaxprompt.parallel.sharding import DATA, Placement
from jaxprompt.training.evaluation import TextWriter, make_answer_fn, make_search


class Answers(NamedTuple):
    """The predictions for some examples, and what their metrics need."""

    columns: list[dict[str, Any]]  # of each example, by column name
    labelled: Labelled  # the examples with a known label
    cut: int  # number of texts that were truncated
    unmarked: int = 0  # number of examples with an entity that is not marked


def make_answers(
    scorer: Scorer, *, generation: GenerateConfig, placement: Placement
) -> Callable[..., Answers]:
    """Makes (params, examples) -> answers in order, compiled once per shape of a batch.

    The optional last argument is the number of the first example in the whole input, which sampled
    texts depend on.
    """
    scorer = with_shared_prefix(scorer)
    head, layout = scorer.head, scorer.layout
    predict = make_answer_fn(
        head.WRITES, placement, scorer.model, generation, scorer.tokenizer, layout
    )

    def answer(params: tree.Params, examples: Sequence[Example], first: int = 0) -> Answers:
        split = scorer.encode(examples)
        units = split.repeat(generation.n) if head.WRITES else split
        batches = EvalBatches(units.rows, units.labels, scorer.layout)
        inputs = {"first": first} if head.WRITES else {}
        scores = predict({}, dict(params), batches, len(units.rows), **inputs)
        return collect_answers(scorer, examples, split, scores)

    return answer


def stream_answer(
    scorer: Scorer,
    generation: GenerateConfig,
    placement: Placement,
    params: tree.Params,
    example: Example,
) -> Iterator[str]:
    """Returns the pieces of the text that is generated for an example.

    Raises InputError at once if the example cannot be encoded, or leaves no room for the text.
    """
    scorer = with_shared_prefix(scorer)
    layout = replace(scorer.layout.single_host(), batch=placement.mesh.shape[DATA])
    split = scorer.encode([example])
    (batch,) = EvalBatches(split.rows, split.labels, layout)
    writer = make_answer_fn(
        True, placement, scorer.model, generation, scorer.tokenizer, scorer.layout
    )
    assert isinstance(writer, TextWriter)
    check_generation(scorer.model, batch, writer.search)
    return writer.stream({}, dict(params), batch)


def collect_answers(
    scorer: Scorer, examples: Sequence[Example], split: Split, scores: Predictions
) -> Answers:
    """Returns the answers to encoded examples from the scores of their units."""
    scorer.head.check_outputs(split.average(scores))
    labelled = scorer.labelled(split, scores)
    columns = list(scorer.answers(examples, split, scores))
    unmarked = split.metric_data.unmarked if split.metric_data else 0
    return Answers(columns, labelled, count_cut(split.by_example()), unmarked)


def mark_errors(
    scorers: Sequence[Scorer], records: Sequence[Record], generations: Sequence[GenerateConfig] = ()
) -> list[Record]:
    """Replaces each example that the scorer of its prompt cannot encode with the error.

    With `generations`, one for each prompt, also each that leaves no room for generated text.
    """
    checked = []
    for record in records:
        scorer = scorers[record.prompt]
        try:
            if record.example:
                split = scorer.encode([record.example])
                batches = EvalBatches(split.rows, split.labels, scorer.layout)
                if generations and scorer.head.WRITES:
                    search = make_search(generations[record.prompt], scorer.layout)
                    check_generation(scorer.model, next(iter(batches)), search)
        except InputError as error:
            record = record._replace(example=None, error=f"{record.origin}: {error}")
        checked.append(record)
    return checked
