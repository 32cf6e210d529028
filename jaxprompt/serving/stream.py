"""Predictions for any number of records, a chunk at a time, so that memory does not grow."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from jaxprompt import tree
from jaxprompt.config.run import GenerateConfig
from jaxprompt.data.sources.records import Record, UnknownLabels, with_examples
from jaxprompt.data.text.overview import unmarked_messages
from jaxprompt.errors import InputError
from jaxprompt.heads import Labelled
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.sharding import Placement
from jaxprompt.serving.answers import Answers, make_answers, mark_errors
from jaxprompt.serving.bank import PromptBank, answer_requests, read_requests

CHUNK_BATCHES = 32  # of a chunk, within which examples are sorted by length

ChunkAnswers = Mapping[int, Answers]  # by the number of the prompt


class Predictor(NamedTuple):
    """One prompt or several, and what is done with records."""

    names: Sequence[str]  # of the prompts; "" = there is only one
    scorers: Sequence[Scorer]
    read: Callable[[Iterable[Record]], Iterator[Record]]  # adds the examples
    # Answers the records with an example; the second argument are the numbers of earlier examples
    # of each prompt.
    answer: Callable[[Sequence[Record], Mapping[int, int]], ChunkAnswers]
    generations: Sequence[GenerateConfig] = ()  # of each prompt; () = none generates text


def one_prompt(
    scorer: Scorer, params: tree.Params, placement: Placement, generation: GenerateConfig
) -> Predictor:
    """Makes the predictor of one prompt."""
    answer_examples = make_answers(scorer, generation=generation, placement=placement)

    def answer(records: Sequence[Record], num_earlier: Mapping[int, int]) -> ChunkAnswers:
        examples = [record.example for record in records if record.example]
        return {0: answer_examples(params, examples, num_earlier[0])} if examples else {}

    return Predictor([""], [scorer], partial(with_examples, scorer.task), answer, [generation])


def several_prompts(bank: PromptBank, column: str) -> Predictor:
    """Makes the predictor of a bank; `column` names the prompt of each row, or a router does."""
    router = bank.router

    def read(records: Iterable[Record]) -> Iterator[Record]:
        if router is not None:
            chunks = in_chunks(records, CHUNK_BATCHES * router.scorer.layout.batch)
            records = itertools.chain.from_iterable(router.route(x, column) for x in chunks)
        return read_requests(bank, records, column)

    return Predictor(
        bank.names, bank.scorers, read, partial(answer_requests, bank), bank.generations
    )


def stop_at_errors(records: Iterable[Record], on_error: str = "") -> Iterator[Record]:
    """Yields records up to the first with an error, which is raised.

    `on_error` is the flag of `predict`: with "skip", all are yielded. Errors of rows whose prompt a
    router chose, or did not, are not raised.
    """
    for record in records:
        if record.error and record.confidence is None and on_error != "skip":
            advice = "; use --on-error=skip to predict the other lines" if on_error else ""
            raise InputError(f"{record.error}{advice}")
        yield record


def in_chunks(records: Iterable[Record], size: int) -> Iterator[list[Record]]:
    """Yields records in lists of `size`; an InputError is raised after those before it."""
    chunk = []
    try:
        for record in records:
            chunk.append(record)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except InputError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def answer_chunks(
    predictor: Predictor, records: Iterable[Record], size: int, on_error: str = ""
) -> Iterator[tuple[list[Record], ChunkAnswers]]:
    """Answers records of which `predictor.read` has read the examples, `size` at a time.

    Yields:
      Records, with an error instead of each example that cannot be encoded, and their answers.

    Raises:
      InputError: for a record with an error, after those before it; see `stop_at_errors`.
    """
    num_examples: Counter[int] = Counter()  # by prompt
    for chunk in in_chunks(stop_at_errors(records, on_error), size):
        try:
            answers = predictor.answer(chunk, num_examples)
        except InputError as error:
            marked = mark_errors(predictor.scorers, chunk, predictor.generations)
            if marked == chunk:
                # The message may count examples, which are those of this chunk.
                raise InputError(f"{chunk[0].origin} to {chunk[-1].origin}: {error}") from error
            for part in in_chunks(stop_at_errors(marked, on_error), len(marked)):
                yield part, predictor.answer(part, num_examples)
            chunk = marked
        else:
            yield chunk, answers
        num_examples.update(record.prompt for record in chunk if record.example is not None)


def in_order(records: Iterable[Record], answers: ChunkAnswers) -> Iterator[dict[str, object]]:
    """Yields the answers in the order of the records that have an example."""
    columns = {prompt: iter(answer.columns) for prompt, answer in answers.items()}
    for record in records:
        if record.example:
            yield next(columns[record.prompt])


class PromptTotals:
    """Counts of the examples of one prompt, and what its metrics need."""

    def __init__(self, scorer: Scorer):
        """Starts at 0."""
        self._scorer = scorer
        self._labelled: list[Labelled] = []
        self._examples = self._cut = self._unmarked = 0
        self.unknown = UnknownLabels(scorer.task)

    def add(self, answers: Answers) -> None:
        """Adds the answers of a chunk, without their columns."""
        self._examples += len(answers.columns)
        self._cut += answers.cut
        self._unmarked += answers.unmarked
        self._labelled.append(answers.labelled)

    def messages(self) -> Iterator[str]:
        """Yields messages with the numbers of unknown labels and of truncated texts."""
        yield from self.unknown.messages()
        if self._cut:
            max_len = self._scorer.layout.max_len
            yield f"texts cut to {max_len} tokens: {self._cut} of {self._examples}"
        yield from unmarked_messages({"the input": (self._unmarked, self._examples)})

    def metrics(self) -> tuple[dict[str, float], int, int]:
        """Returns the metrics, and the numbers of labelled and of all examples."""
        return *self._scorer.measure_labelled(self._labelled), self._examples


class Totals:
    """What `predict` and `evaluate` report after all chunks."""

    def __init__(self, predictor: Predictor):
        """Starts at 0."""
        self._prompts = [PromptTotals(scorer) for scorer in predictor.scorers]
        self._names = predictor.names
        self._records = self._errors = 0
        self._first_error = ""

    def add(self, records: Sequence[Record], answers: ChunkAnswers) -> None:
        """Adds a chunk."""
        for record in records:
            self._prompts[record.prompt].unknown.add(record)
            self._errors += bool(record.error)
            self._first_error = self._first_error or record.error
        self._records += len(records)
        for prompt, answer in answers.items():
            self._prompts[prompt].add(answer)

    def messages(self) -> Iterator[str]:
        """Yields messages with the numbers of unknown labels, truncated texts and errors."""
        for name, totals in zip(self._names, self._prompts, strict=True):
            yield from (f"{name}: {line}" if name else line for line in totals.messages())
        if self._errors:
            yield (
                f"{self._errors} of {self._records} lines have no answer, the first is "
                f"{self._first_error}"
            )

    def metrics(self) -> dict[str, tuple[dict[str, float], int, int]]:
        """Returns the metrics of each prompt, by name; see `PromptTotals.metrics`."""
        return {
            name: totals.metrics() for name, totals in zip(self._names, self._prompts, strict=True)
        }
