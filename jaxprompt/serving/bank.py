"""A bank: exported prompts on one backbone, for batches whose rows name their prompts."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprompt.build.backbone import LoadedBackbone
from jaxprompt.build.prompt_artifact import encode_any, join_params, scorer_from_metadata
from jaxprompt.build.tuned_backbone import tuned_names
from jaxprompt.convert.artifact import check_fingerprint
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.data.batches.batching import EvalBatches, Layout
from jaxprompt.data.sources.records import Record, with_examples
from jaxprompt.data.tasks.cells import describe_non_text, missing_column, spelling
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.encoded import Encoded, Split
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError, nearest
from jaxprompt.models.bank import (
    Bank,
    HeadParams,
    group_heads,
    prefix_positions,
    stack_injections,
    without_positions,
)
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.compilation import cached_factory
from jaxprompt.parallel.sharding import Placement
from jaxprompt.serving.answers import Answers, collect_answers, mark_errors
from jaxprompt.training.evaluation import StartPass, compile_step, dispatch_ahead
from jaxprompt.types import NO_LIMIT, Batch, Injection


class Export(NamedTuple):
    """An export in memory."""

    path: str  # for messages
    tensors: Mapping[str, np.ndarray]
    metadata: PromptMetadata


class PromptGroup(NamedTuple):
    """Prompts whose examples can share a batch."""

    members: list[int]  # indices of the prompts
    bank: Bank
    injections: Injection
    head_groups: list[HeadParams]
    head_indices: list[int]  # index of each member's head in the bank
    step: StartPass  # see `bank_step`


class PromptBank(NamedTuple):
    """Prompts on one backbone, ready to predict."""

    names: tuple[str, ...]
    scorers: list[Scorer]
    groups: list[PromptGroup]
    backbone: Mapping[str, Any]  # its parameters
    placement: Placement

    def find(self, name: Any, where: str) -> int:
        """Returns the index of a prompt. Raises InputError, with `where`, for an unknown name."""
        problem = describe_non_text(name)
        text = "" if problem else spelling(name)  # names may be numbers, too
        if text not in self.names:
            advice = nearest(str(name), self.names)
            raise InputError(f"{where}: unknown prompt {problem or repr(name)[:60]}; {advice}")
        return self.names.index(text)


def name_of(path: str) -> str:
    """Returns the name of a prompt: its folder, or the folder of its run if that is "export"."""
    parts = [part for part in PurePath(path).parts if part not in ("/", "export")]
    return parts[-1] if parts else path


def check_names(names: Sequence[str], paths: Sequence[str], advice: str) -> None:
    """Raises InputError if two prompts have the same name; `advice` says how to name them."""
    for index, name in enumerate(names):
        if name in names[:index]:
            other = paths[list(names).index(name)]
            raise InputError(
                f"{other} and {paths[index]} are both called {name!r}; give each a name: {advice}"
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
        trained_on = export.metadata.backbone
        if trained_on.rescale != opened.config.rescale:
            raise InputError(
                f"prompt {name} was trained with rescale={trained_on.rescale}, the bank's backbone "
                f"has {opened.config.rescale}; serve it separately"
            )
        prompt_backbone = opened._replace(
            config=dataclasses.replace(opened.config, sentinel=trained_on.sentinel)
        )
        try:
            check_fingerprint(trained_on, backbone.loaded.report.fingerprint, force=force)
            scorer = scorer_from_metadata(
                prompt_backbone, export.metadata, batch, backbone.placement, force=force
            )
            scorer = scorer.with_backbone(prompt_backbone)
        except InputError as error:
            raise InputError(f"prompt {name}: {error}") from error
        _check_supported(name, export, scorer)
        scorers.append(scorer)
        prompt_params.append(join_params(export.path, export.tensors, scorer, backbone))
    injections = [
        _compute_injection(scorer, params)
        for scorer, params in zip(scorers, prompt_params, strict=True)
    ]
    by_shape: dict[Any, list[int]] = {}
    for index, scorer in enumerate(scorers):
        # Heads with label words may have a backbone with other last layers.
        shape = scorer.model.backbone.cfg, *_batch_key(scorer.layout, injections[index])
        by_shape.setdefault(shape, []).append(index)
    groups = [
        _make_group(
            backbone.placement,
            members,
            [scorers[i] for i in members],
            [prompt_params[i] for i in members],
            [injections[i] for i in members],
        )
        for members in by_shape.values()
    ]
    params = {"backbone": backbone.loaded.params}
    return PromptBank(tuple(prompts), scorers, groups, params, backbone.placement)


def _check_supported(name: str, export: Export, scorer: Scorer) -> None:
    problems = {
        "generates text": scorer.head.WRITES,
        "is computed from each text": scorer.model.prompt.reads,
        "has tuned backbone weights": bool(tuned_names(export.tensors)),
    }
    for problem, has_problem in problems.items():
        if has_problem:
            raise InputError(
                f"prompt {name} {problem}, which a bank does not support; serve it separately"
            )


def _compute_injection(scorer: Scorer, params: Mapping[str, Any]) -> Injection:
    """Computes the injection of a prompt, which does not depend on the batch."""
    injection = jax.jit(scorer.model.inject)(params, scorer.one_batch(encode_any(scorer)))
    # If no attention depends on the prefix's positions, they may differ within a batch.
    return (
        injection if scorer.model.backbone.reads_prefix_positions else without_positions(injection)
    )


def _batch_key(layout: Layout, injection: Injection) -> tuple[Any, ...]:
    """Returns what prompts must have in common to share a batch."""
    return layout.num_rows, layout.side, layout.branches, layout.pad_id, prefix_positions(injection)


def _make_group(
    placement: Placement,
    members: list[int],
    scorers: Sequence[Scorer],
    params: Sequence[Mapping[str, Any]],
    injections: Sequence[Injection],
) -> PromptGroup:
    heads = [scorer.model.heads["main"] for scorer in scorers]
    head_params = [prompt_params.get("head", {}).get("main", {}) for prompt_params in params]
    kinds, head_groups, head_indices = group_heads(
        heads, head_params, [injection.rows for injection in injections]
    )
    bank = Bank(scorers[0].model.backbone, kinds, scorers[0].layout.num_rows)
    return PromptGroup(
        members,
        bank,
        stack_injections(injections),
        head_groups,
        head_indices,
        bank_step(placement, bank),
    )


@cached_factory
def bank_step(placement: Placement, bank: Bank) -> StartPass:
    """Compiles the scores of a bank, once for all equal banks of a process."""

    def step(
        bank_params: tuple[Injection, list[HeadParams]], params: Mapping[str, Any], batch: Batch
    ):
        injection, head_params = bank_params
        return bank.scores(params, injection, head_params, batch)

    return compile_step(placement, step)


def read_requests(bank: PromptBank, records: Iterable[Record], column: str) -> Iterator[Record]:
    """Reads each row as an example of the prompt that its `column` names."""
    for record in records:
        if record.row is None:
            yield record
            continue
        try:
            if column not in record.row:
                remark = " with the name of the prompt"
                raise InputError(missing_column(record.row, column, record.origin, remark))
            index = bank.find(record.row[column], record.origin)
        except InputError as error:
            yield record._replace(error=str(error))
            continue
        yield from with_examples(bank.scorers[index].task, [record._replace(prompt=index)])


def answer_requests(bank: PromptBank, requests: Sequence[Record]) -> dict[int, Answers]:
    """Answers the records of `read_requests` in shared batches; those without an example are left
    out.

    Returns:
      By the index of each prompt, its answers in the order of its examples.
    """
    records: dict[int, list[Record]] = {}
    for record in requests:
        if record.example is not None:
            records.setdefault(record.prompt, []).append(record)
    splits: dict[int, Split] = {}
    scores_by_prompt: dict[int, np.ndarray] = {}
    for index, scorer in enumerate(bank.scorers):
        if prompt_records := records.get(index):
            splits[index] = _encode(scorer, prompt_records)
    for group in bank.groups:
        indices = [index for index in group.members if index in splits]
        if indices:
            scores_by_prompt |= _score_group(
                bank, group, {index: splits[index] for index in indices}
            )
    answers = {}
    for index, split in splits.items():
        answers[index] = collect_answers(
            bank.scorers[index], _examples(records[index]), split, scores_by_prompt[index]
        )
    return answers


def _examples(records: Sequence[Record]) -> list[Example]:
    return [record.example for record in records if record.example is not None]


def _encode(scorer: Scorer, records: Sequence[Record]) -> Split:
    """Encodes the examples of records. Raises InputError with file and line."""
    try:
        return scorer.encode(_examples(records))
    except InputError:
        for record in mark_errors([scorer], [record._replace(prompt=0) for record in records]):
            if record.error:
                raise InputError(record.error) from None
        raise


def _score_group(
    bank: PromptBank, group: PromptGroup, splits: Mapping[int, Split]
) -> dict[int, np.ndarray]:
    """Scores the units of some prompts in shared batches. Returns for each prompt [units, ...]."""
    rows, member_indices = [], []
    for index, split in splits.items():
        layout = bank.scorers[index].layout
        rows += [[_shift(row, layout) for row in unit] for unit in split.rows]
        member_indices += [group.members.index(index)] * len(split.rows)
    if any(row.num_choices for unit in rows for row in unit):
        # Numbers of choices are one array of a batch; rows without a limit have all classes.
        rows = [
            [row._replace(num_choices=row.num_choices or NO_LIMIT) for row in unit] for unit in rows
        ]
    layouts = [bank.scorers[index].layout for index in splits]
    # `_shift` shifts the rows, because prompts of one batch may shift by different numbers.
    layout = dataclasses.replace(
        layouts[0],
        max_len=max(layout.max_len for layout in layouts),
        shift=0,
        decoder_shift=0,
        multiple=max(layout.multiple for layout in layouts),
    )
    batches = EvalBatches(rows, [-1] * len(rows), layout)
    # By unit, in the order of `rows`; a batch selects from it by index.
    unit_members = np.array(member_indices, np.int32)
    bank_params = group.injections, group.head_groups
    scores_by_head: dict[int, np.ndarray] = {}  # by kind of head
    score_batch = group.step(bank_params, bank.backbone)
    for indices, scores_of_heads in dispatch_ahead(
        score_batch(_with_prompts(batch, unit_members)) for batch in batches
    ):
        unit_indices = np.asarray(indices)
        # Padding rows of the batch have index -1.
        is_example = unit_indices >= 0
        for head_index, scores in enumerate(scores_of_heads):
            if head_index not in scores_by_head:
                shape = len(rows), *scores.shape[1:]
                scores_by_head[head_index] = np.full(shape, np.nan, np.float32)
            head_scores = np.asarray(scores, np.float32)
            scores_by_head[head_index][unit_indices[is_example]] = head_scores[is_example]
    scores_by_prompt = {}
    for index in splits:
        member = group.members.index(index)
        # Every head has scored every row; only the scores of the prompt's own head are used.
        scores_by_prompt[index] = scores_by_head[group.head_indices[member]][unit_members == member]
    return scores_by_prompt


def _with_prompts(batch: Batch, prompts: np.ndarray) -> Batch:
    """Sets the prompt of each example; padding rows of the batch use the first prompt."""
    return batch._replace(prompt=np.where(batch.index >= 0, prompts[batch.index], 0))


def _shift(row: Encoded, layout: Layout) -> Encoded:
    """Shifts the positions of a row as its layout does."""
    decoder = row.decoder
    if decoder is not None:
        decoder = decoder._replace(positions=decoder.positions + layout.decoder_shift)
    return row._replace(positions=row.positions + layout.shift, decoder=decoder)
