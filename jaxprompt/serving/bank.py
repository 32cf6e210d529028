"""A bank: exported prompts that share one backbone, for rows that each name their prompt."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprompt.build.backbone import LoadedBackbone
from jaxprompt.build.prompt_artifact import join, scorer_from_metadata
from jaxprompt.build.tuned_backbone import tuned_names
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.data.batches.batching import EvalBatches, Layout
from jaxprompt.data.sources.records import Record, with_examples
from jaxprompt.data.tasks.cells import spelling, unreadable
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.encoded import Encoded, Split, count_cut
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError, nearest, show_columns
from jaxprompt.models.bank import (
    Bank,
    HeadParams,
    group_heads,
    prefix_positions,
    stack_injections,
    without_positions,
)
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.compilation import shared
from jaxprompt.parallel.sharding import Placement
from jaxprompt.serving.answers import Answered, mark_errors
from jaxprompt.training.evaluation import Step, ahead, place_step
from jaxprompt.types import NO_LIMIT, Batch, Injection


class Export(NamedTuple):
    """An export in memory."""

    path: str  # for messages
    tensors: Mapping[str, np.ndarray]
    metadata: PromptMetadata


class Shelf(NamedTuple):
    """Prompts whose rows can share a batch."""

    members: list[int]  # indices of the prompts
    bank: Bank
    added: Injection
    held: list[HeadParams]
    kinds: list[int]  # index of each member's head in the bank
    step: Step


class PromptBank(NamedTuple):
    """Prompts on one backbone, ready to predict."""

    names: tuple[str, ...]
    scorers: list[Scorer]
    shelves: list[Shelf]
    backbone: Mapping[str, Any]  # its parameters
    placement: Placement

    def find(self, name: Any, where: str) -> int:
        """Returns the index of a prompt. Raises InputError, with `where`, for an unknown name."""
        held = unreadable(name)
        spelled = "" if held else spelling(name)  # names may be numbers, too
        if spelled not in self.names:
            known = nearest(str(name), self.names)
            raise InputError(f"{where}: unknown prompt {held or repr(name)[:60]}; {known}")
        return self.names.index(spelled)


def name_of(path: str) -> str:
    """Returns the name of a prompt: its folder, or the folder of its run if that is "export"."""
    parts = [part for part in PurePath(path).parts if part not in ("/", "export")]
    return parts[-1] if parts else path


def check_names(names: Sequence[str], paths: Sequence[str], how: str) -> None:
    """Raises InputError if two prompts have the same name; `how` says how to name them."""
    for number, name in enumerate(names):
        if name in names[:number]:
            other = paths[list(names).index(name)]
            raise InputError(
                f"{other} and {paths[number]} are both called {name!r}; give each a name: {how}"
            )


def make_bank(
    backbone: LoadedBackbone, prompts: Mapping[str, Export], *, batch: int, force: bool = False
) -> PromptBank:
    """Makes a bank of prompts on the backbone that they share.

    Args:
      backbone: the backbone.
      prompts: by name.
      batch: examples per batch.
      force: accept prompts that were trained on other weights.

    Raises:
      InputError: with the name of the prompt, for one that was trained on other weights, generates
        text, is computed from each text, or has tuned backbone weights. Serve these separately.
    """
    opened = backbone.backbone
    opened = opened._replace(tokenizer=opened.tokenizer or load_tokenizer(opened.folder))
    scorers, prompt_params = [], []
    for name, export in prompts.items():
        learned_on = export.metadata.backbone
        held = backbone.loaded.report.fingerprint
        if learned_on.fingerprint != held and not force:
            raise InputError(
                f"prompt {name} was trained on weights {learned_on.fingerprint[:12]} "
                f"({learned_on.id}), and this bank uses {held[:12]} ({opened.config.path}); "
                "serve the prompt separately, or give --force (force=True)"
            )
        if learned_on.rescale != opened.config.rescale:
            raise InputError(
                f"prompt {name} was trained with rescale={learned_on.rescale}, the bank's backbone "
                f"has {opened.config.rescale}; serve it separately"
            )
        prompt_backbone = opened._replace(
            config=dataclasses.replace(opened.config, sentinel=learned_on.sentinel)
        )
        try:
            scorer = scorer_from_metadata(prompt_backbone, export.metadata, batch, force=force)
            scorer = scorer.with_backbone(prompt_backbone)
        except InputError as error:
            raise InputError(f"prompt {name}: {error}") from error
        _check(name, export, scorer)
        scorers.append(scorer)
        prompt_params.append(join(export.path, export.tensors, scorer, backbone))
    added = [_added(scorer, params) for scorer, params in zip(scorers, prompt_params, strict=True)]
    apart: dict[Any, list[int]] = {}
    for number, scorer in enumerate(scorers):
        # Heads that read words may have a backbone with other last layers.
        shape = scorer.model.backbone.cfg, *_shape_of(scorer.layout, added[number])
        apart.setdefault(shape, []).append(number)
    shelves = [
        _make_shelf(
            backbone.placement, members, [scorers[i] for i in members],
            [prompt_params[i] for i in members], [added[i] for i in members],
        )
        for members in apart.values()
    ]  # fmt: skip
    params = {"backbone": backbone.loaded.params}
    return PromptBank(tuple(prompts), scorers, shelves, params, backbone.placement)


def _check(name: str, export: Export, scorer: Scorer) -> None:
    alone = "; serve it separately"
    if scorer.head.WRITES:
        raise InputError(f"prompt {name} generates text, which a bank does not support{alone}")
    if scorer.model.prompt.reads:
        raise InputError(
            f"prompt {name} is computed from each text, which a bank does not support{alone}"
        )
    if tuned_names(export.tensors):
        raise InputError(
            f"prompt {name} has tuned backbone weights, and the prompts of a bank share one "
            f"backbone{alone}"
        )


def _added(scorer: Scorer, params: Mapping[str, Any]) -> Injection:
    """Computes the injection of a prompt, which does not depend on the batch."""
    choices = (" ",) * scorer.layout.num_rows
    rows = scorer.encoder.encode_all([scorer.task.example(" ", choices)])
    added = jax.jit(scorer.model.inject)(params, scorer.one_batch(rows))
    # If no distance depends on positions, they need not be equal within a batch.
    return added if scorer.model.backbone.reads_prefix_positions else without_positions(added)


def _shape_of(layout: Layout, added: Injection) -> tuple[Any, ...]:
    """Returns what prompts must have in common to share a batch."""
    return layout.num_rows, layout.side, layout.branches, layout.pad_id, prefix_positions(added)


def _make_shelf(
    placement: Placement, members: list[int], scorers: Sequence[Scorer],
    params: Sequence[Mapping[str, Any]], added: Sequence[Injection],
) -> Shelf:  # fmt: skip
    heads = [scorer.model.heads["main"] for scorer in scorers]
    numbers = [prompt.get("head", {}).get("main", {}) for prompt in params]
    kinds, held, of = group_heads(heads, numbers, [injection.rows for injection in added])
    bank = Bank(scorers[0].model.backbone, kinds, scorers[0].layout.num_rows)
    return Shelf(members, bank, stack_injections(added), held, of, bank_step(placement, bank))


@shared
def bank_step(placement: Placement, bank: Bank) -> Step:
    """Compiles the scores of a bank, once for all equal banks of a process."""

    def step(given: tuple[Injection, list[HeadParams]], params: Mapping[str, Any], batch: Batch):
        added, held = given
        return bank.scores(params, added, held, batch)

    return place_step(placement, step)


def read_requests(
    bank: PromptBank, records: Sequence[Record], column: str
) -> list[tuple[int, Record]]:
    """Reads each row as an example of the prompt that its `column` names.

    Returns:
      For each example the index of its prompt, -1 if it could not be read, and its record.
    """
    requests = []
    for record in records:
        if record.row is None:
            requests.append((-1, record))
            continue
        try:
            if column not in record.row:
                raise InputError(
                    f"{record.origin}: no column {column!r} with the name of the prompt; "
                    f"{show_columns(record.row)}"
                )
            number = bank.find(record.row[column], record.origin)
        except InputError as error:
            requests.append((-1, record._replace(error=str(error))))
            continue
        examples = with_examples(bank.scorers[number].task, [record])
        requests += [(number, each) for each in examples]
    return requests


def mark_requests(
    bank: PromptBank, requests: Sequence[tuple[int, Record]]
) -> list[tuple[int, Record]]:
    """Replaces each example that its prompt cannot encode with the error."""
    return [(n, mark_errors(bank.scorers[n], [record])[0]) for n, record in requests]


def in_order(
    requests: Sequence[tuple[int, Record]], answers: Mapping[int, Answered]
) -> Iterator[dict[str, Any]]:
    """Yields the answers in the order of the records that have an example."""
    columns = {number: iter(answered.columns) for number, answered in answers.items()}
    for number, record in requests:
        if record.example:
            yield next(columns[number])


def answer(bank: PromptBank, requests: Sequence[tuple[int, Record]]) -> dict[int, Answered]:
    """Answers requests in shared batches; records without an example are left out.

    Returns:
      By the index of each prompt, its answers in the order of its examples.
    """
    records: dict[int, list[Record]] = {}
    for number, record in requests:
        if record.example is not None:
            records.setdefault(number, []).append(record)
    splits: dict[int, Split] = {}
    scores_of: dict[int, np.ndarray] = {}
    for number, scorer in enumerate(bank.scorers):
        if prompt_records := records.get(number):
            splits[number] = _encode(scorer, prompt_records)
    for shelf in bank.shelves:
        here = [number for number in shelf.members if number in splits]
        if here:
            scores_of |= _score(bank, shelf, {number: splits[number] for number in here})
    answers = {}
    for number, split in splits.items():
        scorer, scores = bank.scorers[number], scores_of[number]
        scorer.head.check_outputs(split.average(scores))
        measured, known = scorer.measure_known(split, scores)
        columns = list(scorer.answers(_examples(records[number]), split, scores))
        unmarked = split.judged.unmarked if split.judged else 0
        answers[number] = Answered(
            columns, measured, known, count_cut(split.by_example()), unmarked
        )
    return answers


def _examples(records: Sequence[Record]) -> list[Example]:
    return [record.example for record in records if record.example is not None]


def _encode(scorer: Scorer, records: Sequence[Record]) -> Split:
    """Encodes the examples of records. Raises InputError with file and line."""
    try:
        return scorer.encode(_examples(records))
    except InputError:
        for record in mark_errors(scorer, records):
            if record.error:
                raise InputError(record.error) from None
        raise


def _score(bank: PromptBank, shelf: Shelf, splits: Mapping[int, Split]) -> dict[int, np.ndarray]:
    """Scores the units of some prompts in shared batches. Returns for each prompt [units, ...]."""
    rows, owners = [], []
    for number, split in splits.items():
        layout = bank.scorers[number].layout
        rows += [[_shift(row, layout) for row in unit] for unit in split.rows]
        owners += [shelf.members.index(number)] * len(split.rows)
    if any(row.num_choices for unit in rows for row in unit):
        # Counts are one array of a batch: where no row limits the classes, all of them count.
        rows = [
            [row._replace(num_choices=row.num_choices or NO_LIMIT) for row in unit] for unit in rows
        ]
    layouts = [bank.scorers[number].layout for number in splits]
    # The shift is in the rows themselves: prompts of one batch may shift by different numbers.
    layout = dataclasses.replace(
        layouts[0], max_len=max(own.max_len for own in layouts), shift=0, decoder_shift=0,
        multiple=max(own.multiple for own in layouts),
    )  # fmt: skip
    batches = EvalBatches(rows, [-1] * len(rows), layout)
    # By unit, in the order of `rows`; a batch picks its own by index.
    prompts = np.array(owners, np.int32)
    given = shelf.added, shelf.held
    every: dict[int, np.ndarray] = {}  # by kind of head
    for index, scored in _each(shelf.step, given, bank.backbone, batches, prompts):
        # Rows that only fill the batch have no place among the units.
        there = index >= 0
        for kind, value in enumerate(scored):
            if kind not in every:
                every[kind] = np.full((len(rows), *value.shape[1:]), np.nan, np.float32)
            every[kind][index[there]] = value[there]
    parts = {}
    for number in splits:
        member = shelf.members.index(number)
        # Every head has scored every row: a prompt takes what its own kind of head gave.
        parts[number] = every[shelf.kinds[member]][prompts == member]
    return parts


def _each(
    step: Callable, given: Any, params: Mapping[str, Any], batches: EvalBatches, prompts: np.ndarray
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Runs the batches. Yields the units of the rows of each, and their scores by head."""
    score = step(given, params)
    for index, scored in ahead(score(_with_prompts(batch, prompts)) for batch in batches):
        yield np.asarray(index), [np.asarray(value, np.float32) for value in scored]


def _with_prompts(batch: Batch, prompts: np.ndarray) -> Batch:
    """Sets the prompt of each example; padding rows of the batch use the first prompt."""
    return batch._replace(prompt=np.where(batch.index >= 0, prompts[batch.index], 0))


def _shift(row: Encoded, layout: Layout) -> Encoded:
    """Shifts the positions of a row as its layout does."""
    decoder = row.decoder
    if decoder is not None:
        decoder = decoder._replace(positions=decoder.positions + layout.decoder_shift)
    return row._replace(positions=row.positions + layout.shift, decoder=decoder)
