"""A bank: exported prompts on one backbone, for batches whose rows name their prompts."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from jaxprompt.build.backbone import LoadedBackbone
from jaxprompt.build.prompt_artifact import (
    Export,
    encode_any,
    join_params,
    scorer_from_metadata,
)
from jaxprompt.build.tuned_backbone import tuned_names
from jaxprompt.config.run import GenerateConfig
from jaxprompt.convert.artifact import check_fingerprint
from jaxprompt.data.batches.batching import EvalBatches, Layout
from jaxprompt.data.sources.records import Record, with_examples
from jaxprompt.data.tasks.cells import describe_non_text, missing_column, spelling
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.encoded import Encoded, Predictions, Split
from jaxprompt.data.text.tokenizer import Tokenizer, load_tokenizer
from jaxprompt.errors import InputError, nearest
from jaxprompt.models.bank import (
    Bank,
    HeadParams,
    group_heads,
    prefix_positions,
    stack_injections,
    without_positions,
    writing_model,
    writing_params,
)
from jaxprompt.models.generation import check_generation
from jaxprompt.models.scorer import Scorer
from jaxprompt.parallel.compilation import cached_factory
from jaxprompt.parallel.sharding import Placement
from jaxprompt.serving.answers import Answers, collect_answers, mark_errors
from jaxprompt.serving.router import COLUMNS, Router, make_router
from jaxprompt.training.evaluation import (
    StartPass,
    TextWriter,
    compile_step,
    dispatch_ahead,
    make_answer_fn,
)
from jaxprompt.types import NO_LIMIT, Batch, Injection


class PromptGroup(NamedTuple):
    """Prompts whose examples can share a batch."""

    members: list[int]  # indices of the prompts
    bank: Bank
    injections: Injection
    # Heads that score; a prompt that generates texts has none.
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
    generations: Sequence[GenerateConfig] = ()  # of each prompt
    router: Router | None = None  # chooses the prompts of rows that name none

    @property
    def writes(self) -> bool:
        """Whether a prompt generates texts."""
        return any(scorer.head.WRITES for scorer in self.scorers)

    def writing(
        self, generations: Sequence[GenerateConfig], *, every: bool = False
    ) -> "PromptBank":
        """Returns a bank whose prompts generate texts by these configs.

        Only those with a head that does, or with `every` all. Raises InputError, with the name of
        the prompt, if the backbone cannot.
        """
        scorers = list(self.scorers)
        for index, (name, scorer) in enumerate(zip(self.names, scorers, strict=True)):
            if every or scorer.head.WRITES:
                try:
                    scorers[index] = scorer.writing(generations[index].max_new_tokens)
                except InputError as error:
                    raise InputError(f"prompt {name}: {error}") from error
        return self._replace(scorers=scorers, generations=generations)

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
    backbone: LoadedBackbone,
    prompts: Mapping[str, Export],
    *,
    batch: int,
    force: bool = False,
    router: Export | None = None,
) -> PromptBank:
    """Makes a bank of prompts on the backbone that they share.

    Args:
      backbone: the backbone.
      prompts: by name.
      batch: examples per batch.
      force: accept prompts that were trained on other weights, and a router of other prompts.
      router: chooses the prompts of rows that name none.

    Raises:
      InputError: with the name of the prompt, for one that was trained on other weights, is
        computed from each text, or has tuned backbone weights, which serve separately; and for a
        router of other prompts.
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
    groups = [
        _make_group(
            backbone.placement,
            members,
            [scorers[i] for i in members],
            [prompt_params[i] for i in members],
            [injections[i] for i in members],
        )
        for members in _share_shapes(scorers, injections)
    ]
    params = {"backbone": backbone.loaded.params}
    generations = [export.metadata.generate for export in prompts.values()]
    bank = PromptBank(tuple(prompts), scorers, groups, params, backbone.placement)
    if router is not None:
        bank = bank._replace(
            router=make_router(backbone, router, prompts, batch=batch, force=force)
        )
    return bank.writing(generations)


def _share_shapes(scorers: Sequence[Scorer], injections: Sequence[Injection]) -> list[list[int]]:
    """Groups the indices of prompts that can share batches."""
    by_shape: dict[Any, list[int]] = {}
    for index, (scorer, injection) in enumerate(zip(scorers, injections, strict=True)):
        # Heads with label words may have a backbone with other last layers.
        cfg, key = scorer.model.backbone.cfg, _batch_key(scorer.layout, injection)
        by_shape.setdefault((cfg, scorer.head.WRITES, *key), []).append(index)
    return list(by_shape.values())


def _check_supported(name: str, export: Export, scorer: Scorer) -> None:
    problems = {
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
    # All members generate texts, or none.
    scoring = [] if scorers[0].head.WRITES else range(len(scorers))
    kinds, head_groups, head_indices = group_heads(
        [scorers[i].model.heads["main"] for i in scoring],
        [params[i].get("head", {}).get("main", {}) for i in scoring],
        [injections[i].rows for i in scoring],
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
    """Reads each row as an example of the prompt that its `column` names, or a router chose."""
    for record in records:
        if record.row is None or record.error:
            yield record
            continue
        if record.confidence is not None:
            yield from _read_routed(bank, record)
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


def _read_routed(bank: PromptBank, record: Record) -> Iterator[Record]:
    """Reads the examples of a row whose prompt a router chose; an error names the prompt."""
    for request in with_examples(bank.scorers[record.prompt].task, [record]):
        if request.error:
            remark = f"; the router chose prompt {bank.names[record.prompt]}"
            request = request._replace(error=request.error + remark)
        yield request


def answer_requests(
    bank: PromptBank,
    requests: Sequence[Record],
    num_earlier: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, Answers]:
    """Answers the records of `read_requests` in shared batches.

    Args:
      bank: the prompts.
      requests: the records; those without an example are left out.
      num_earlier: by the index of a prompt, the number of its examples in earlier requests, which
        sampled texts depend on.

    Returns:
      By the index of each prompt, its answers in the order of its examples.

    Raises:
      InputError: for an example that cannot be encoded, or that leaves no room for a text.
    """
    records: dict[int, list[Record]] = {}
    for record in requests:
        if record.example is not None:
            records.setdefault(record.prompt, []).append(record)
    splits: dict[int, Split] = {}
    outputs: dict[int, Predictions] = {}
    for index, scorer in enumerate(bank.scorers):
        if prompt_records := records.get(index):
            splits[index] = _encode(scorer, prompt_records)
    for group in bank.groups:
        # Texts by different configs are generated one config after the other.
        passes: dict[_Writing | None, dict[int, Split]] = {}
        for index in group.members:
            if index in splits:
                scorer = bank.scorers[index]
                writes = scorer.head.WRITES
                key = _Writing(bank.generations[index], scorer.layout.ends) if writes else None
                passes.setdefault(key, {})[index] = splits[index]
        for writing, parts in passes.items():
            if writing is None:
                outputs |= _score_group(bank, group, parts)
            else:
                outputs |= _write_group(bank, group, writing, parts, num_earlier)
    answers = {}
    for index, split in splits.items():
        answers[index] = collect_answers(
            bank.scorers[index], _examples(records[index]), split, outputs[index]
        )
        columns = [
            row
            if x.confidence is None
            else dict(zip(COLUMNS, (bank.names[index], x.confidence), strict=True)) | row
            for x, row in zip(records[index], answers[index].columns, strict=True)
        ]
        answers[index] = answers[index]._replace(columns=columns)
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
) -> dict[int, Predictions]:
    """Scores the units of some prompts in shared batches. Returns for each prompt [units, ...]."""
    batches, unit_members = _share_batches(bank, group, splits)
    bank_params = group.injections, group.head_groups
    scores_by_head: dict[int, np.ndarray] = {}  # by kind of head
    score_batch = group.step(bank_params, bank.backbone)
    for indices, scores_of_heads in dispatch_ahead(score_batch(b) for b in batches):
        unit_indices = np.asarray(indices)
        # Padding rows of the batch have index -1.
        is_example = unit_indices >= 0
        for head_index, scores in enumerate(scores_of_heads):
            if head_index not in scores_by_head:
                shape = len(unit_members), *scores.shape[1:]
                scores_by_head[head_index] = np.full(shape, np.nan, np.float32)
            head_scores = np.asarray(scores, np.float32)
            scores_by_head[head_index][unit_indices[is_example]] = head_scores[is_example]
    scores_by_prompt: dict[int, Predictions] = {}
    for index in splits:
        member = group.members.index(index)
        # Every head has scored every row; only the scores of the prompt's head are used.
        scores_by_prompt[index] = scores_by_head[group.head_indices[member]][unit_members == member]
    return scores_by_prompt


class _Writing(NamedTuple):
    """How texts are generated that can share a pass."""

    generation: GenerateConfig
    ends: tuple[int, ...]  # end ids of the model


@cached_factory
def bank_writer(
    placement: Placement,
    backbone: nn.Module,
    writing: _Writing,
    tokenizer: Tokenizer,
    layout: Layout,
) -> TextWriter:
    """Makes the writer of prompts on a backbone, once for all equal ones of a process."""
    layout = dataclasses.replace(layout, ends=writing.ends)
    model = writing_model(backbone)
    writer = make_answer_fn(True, placement, model, writing.generation, tokenizer, layout)
    assert isinstance(writer, TextWriter)
    return writer


def _write_group(
    bank: PromptBank,
    group: PromptGroup,
    writing: _Writing,
    splits: Mapping[int, Split],
    num_earlier: Mapping[int, int],
) -> dict[int, Predictions]:
    """Generates the texts of some prompts in shared batches. Returns for each prompt its texts.

    A row has the random key that it has if its prompt is served alone.
    """
    scorer, samples = bank.scorers[group.members[0]], writing.generation.n
    writer = bank_writer(
        bank.placement, group.bank.backbone, writing, scorer.tokenizer, scorer.layout
    )
    for index, split in splits.items():
        # The positions of each prompt alone, since prompts shift them by different numbers.
        longest = max(split.rows, key=lambda unit: len(unit[0].ids))
        try:
            model, batch = bank.scorers[index].model, bank.scorers[index].one_batch([longest])
            check_generation(model, batch, writer.search)
        except InputError as error:
            raise InputError(f"prompt {bank.names[index]}: {error}") from error
    units = {index: split.repeat(samples) for index, split in splits.items()}
    numbers = [num_earlier.get(i, 0) * samples + np.arange(len(x.rows)) for i, x in units.items()]
    batches, unit_members = _share_batches(bank, group, units, np.concatenate(numbers))
    params = writing_params(bank.backbone, group.injections)
    texts = writer({}, params, batches, len(unit_members))
    ends = np.cumsum([len(split.rows) for split in splits.values()]).tolist()
    return {
        index: texts[end - len(split.rows) : end]
        for end, (index, split) in zip(ends, splits.items(), strict=True)
    }


def _share_batches(
    bank: PromptBank,
    group: PromptGroup,
    splits: Mapping[int, Split],
    numbers: np.ndarray | None = None,
) -> tuple[Iterator[Batch], np.ndarray]:
    """Puts the units of some prompts into shared batches.

    Args:
      bank: the prompts.
      group: the group of these prompts.
      splits: the units by the index of the prompt.
      numbers: `Batch.number` of all units, int [units].

    Returns:
      The batches, whose indices count the units of all prompts, and the member of the group that
      each unit belongs to, int32 [units].
    """
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

    def select(values: np.ndarray, batch: Batch) -> np.ndarray:
        # Padding rows of the batch have the prompt and the number 0.
        return np.where(batch.index >= 0, values[batch.index], 0).astype(np.int32)

    shared = (batch._replace(prompt=select(unit_members, batch)) for batch in batches)
    if numbers is not None:
        shared = (batch._replace(number=select(numbers, batch)) for batch in shared)
    return shared, unit_members


def _shift(row: Encoded, layout: Layout) -> Encoded:
    """Shifts the positions of a row as its layout does."""
    decoder = row.decoder
    if decoder is not None:
        decoder = decoder._replace(positions=decoder.positions + layout.decoder_shift)
    return row._replace(positions=row.positions + layout.shift, decoder=decoder)
