"""Runs of a group that train on the examples of a task."""

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprompt.build.backbone import load_weights
from jaxprompt.build.evaluation import build_measure
from jaxprompt.build.examples import examples_key
from jaxprompt.build.initial_params import Weights, count_corpus, count_tokens, start
from jaxprompt.build.method import method_of
from jaxprompt.build.placement import build_placement, tell_kernel
from jaxprompt.build.task import (
    build_objectives,
    longest_batch,
    open_fitting,
    tell_examples,
    train_batches,
)
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.load import Loaded
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.parallel.sharding import Placement
from jaxprompt.prompts import with_task
from jaxprompt.runs import record as records
from jaxprompt.runs.grid.batched_steps import PerRun, Programs
from jaxprompt.runs.grid.expand import GridRun
from jaxprompt.runs.grid.group import Member, Shared, side_by_side
from jaxprompt.runs.train import PreparedTask, TaskInputs, prepare_run, read_inputs
from jaxprompt.training.evaluation import ahead
from jaxprompt.training.features.cache import FeatureCache, KeepingPlan
from jaxprompt.training.one_run import Feed
from jaxprompt.tree import Flat
from jaxprompt.types import Asks

_OTHER_WORDS = (
    "prompt.name={} depends on the label words, so all runs of a grid must share them, but this "
    "run has other words than the first; train it in a separate grid"
)


class _SharedInputs(NamedTuple):
    """What runs with the same examples have in common."""

    run_name: str  # the first of them
    inputs: TaskInputs
    lines: list[str]  # that are printed


def prepare(
    runs: Sequence[GridRun], workdir: Path, failed: Callable[[GridRun, Exception], None]
) -> tuple[Shared, list[Member]]:
    """Loads the inputs of runs that differ only in fields of `grid.VARIES`.

    Equal inputs are loaded and encoded once. Invalid runs are passed to `failed`.
    """
    config = runs[0].config
    placement = build_placement(config)
    # What each run starts from is checked for it alone, see `check_start`.
    backbone = open_fitting(config, placement, restored=True)
    backbone = backbone._replace(tokenizer=load_tokenizer(backbone.folder))
    pairs = _read_inputs(runs, placement, backbone, failed)
    backbone, loaded = load_weights(backbone, placement)
    corpus = functools.cache(lambda: count_corpus(config, pairs[0][1].inputs.scorer, workdir))
    models: dict[str, Model] = {}
    members = []
    for run, shared_inputs in pairs:
        inputs = shared_inputs.inputs
        prompt, asks = method_of(run.config, backbone.module.dims), _asks(inputs.scorer)
        if asks != _asks(pairs[0][1].inputs.scorer):
            failed(run, InputError(_OTHER_WORDS.format(run.config.prompt.name)))
            continue
        scorer = inputs.scorer.with_prompt(with_task(prompt, asks))
        scorer = scorer.with_vocabulary_of(inputs.splits["train"])
        inputs = dataclasses.replace(inputs, scorer=scorer)
        member = _member(run, prepare_run(run.config, inputs, placement, backbone, loaded))
        counts = count_tokens(run.config, inputs.splits["train"], corpus)
        members.append(_with_shared_model(member._replace(counts=counts), models))
    members, fill = _keep(config, members, loaded, placement, workdir)
    for member in members:
        records.check_repeated(member.run.folder, member.record)
    says = [f"backbone {backbone.config.path} ({backbone.family})"]
    says += tell_kernel(config, placement, backbone)
    says += _example_lines([shared_inputs for _, shared_inputs in pairs])
    objectives = build_objectives(config, members[0].model) if members else []
    shared = Shared(config, placement, loaded, objectives, SplitScorer, says)
    return shared._replace(fill=fill), members


def _read_inputs(
    runs: Sequence[GridRun], placement: Placement, backbone: Backbone,
    failed: Callable[[GridRun, Exception], None],
) -> list[tuple[GridRun, _SharedInputs]]:  # fmt: skip
    """Loads and encodes the examples of runs, equal ones once. Returns runs with their examples."""
    splits_by_digest: dict[tuple[str, str], Split] = {}
    shared_inputs: dict[str, _SharedInputs] = {}
    pairs = []
    for run in runs:
        key = examples_key(run.config)
        try:
            if key not in shared_inputs:
                inputs = read_inputs(run.config, placement, backbone)
                lines = tell_examples(inputs.scorer, inputs.splits, inputs.notes)
                # A split that is the same in all runs is laid out once.
                splits = {
                    name: splits_by_digest.setdefault((name, part.digest()), part)
                    for name, part in inputs.splits.items()
                }
                inputs = dataclasses.replace(inputs, splits=splits)
                shared_inputs[key] = _SharedInputs(run.name, inputs, lines)
        except InputError as error:
            failed(run, error)
            continue
        pairs.append((run, shared_inputs[key]))
    return pairs


def _with_shared_model(member: Member, models: dict[str, Model]) -> Member:
    """Replaces the model of a member by an equal one of `models`, so that programs are shared."""
    model, words = member.model, [array.tolist() for array in jax.tree.leaves(member.words)]
    key = json.dumps([model.prompt.block(), member.scorer.classes, words, model.shared_prefix])
    model = models.setdefault(key, model)
    return member._replace(scorer=member.scorer._replace(model=model), model=model)


def _example_lines(inputs: Sequence[_SharedInputs]) -> list[str]:
    """Returns log lines about the examples of runs, with the name of a run if they differ."""
    lines_by_run = {data.run_name: data.lines for data in inputs}
    counts = Counter(line for lines in lines_by_run.values() for line in set(lines))
    is_common = lambda line: counts[line] == len(lines_by_run)
    lines = list(filter(is_common, inputs[0].lines)) if inputs else []
    for name, own_lines in lines_by_run.items():
        lines += [f"{name}: {line}" for line in own_lines if not is_common(line)]
    return lines


def _keep(
    config: RunConfig,
    members: Sequence[Member],
    loaded: Loaded,
    placement: Placement,
    workdir: Path,
) -> tuple[list[Member], Callable[..., None]]:
    """Plans the feature cache of runs, once for equal rows. Returns (members, fill).

    Raises InputError if a run cannot cache states, or all exceed the limit.
    """
    plan = KeepingPlan(config, placement, workdir, several=True)
    weights: dict[int, Weights] = {}  # of equal models, whose numbers do not matter here
    cached_members = []
    for member in members:
        config_of_run, model = member.run.config, id(member.model)
        if plan.keeps and model not in weights:
            weights[model] = start(
                config_of_run, member.scorer, loaded, member.counts, placement, restored=True
            )
        cache = plan.add(member.scorer, member.held, weights.get(model))
        cached_members.append(member._replace(kept=cache))
    plan.check()

    def fill(members: Sequence[Member], say: Callable[[str], None]) -> None:
        # In the order of the runs; a split that several have stands there once.
        parts = list(dict.fromkeys(part for m in members if m.kept for part in m.kept.parts))
        plan.open(parts)
        plan.fill(parts, next(iter(weights.values()), None), say)

    return cached_members, fill


def _asks(scorer: Scorer) -> Asks:
    """Returns what the method knows of the task; empty if it does not depend on the task."""
    return getattr(scorer.model.prompt, "asks", Asks())


def _member(run: GridRun, prepared: PreparedTask) -> Member:
    config, scorer, train = run.config, prepared.scorer, prepared.splits["train"]
    member = Member(
        run, scorer, scorer.model, prepared.milestones, prepared.steps_per_epoch, (),
        source=train, feed=partial(_feed, config, scorer, train),
        longest=partial(longest_batch, config, scorer, train), held=prepared.splits,
        record=prepared.record,
    )  # fmt: skip
    words = str(jax.tree.map(np.shape, member.words))
    # One program knows the words of one training text, and what a method computes with.
    prompt = scorer.model.prompt
    shape = (
        prepared.steps_per_epoch, scorer.layout, scorer.classes, words, prompt.seen,
        prompt.static_values(),
    )  # fmt: skip
    return member._replace(shape=shape)


def _feed(config: RunConfig, scorer: Scorer, train: Split) -> Feed:
    batches = train_batches(config, scorer, train)
    return Feed(batches, lambda: next(batches))


class SplitScorer:
    """Evaluates runs of one program on splits. `Member.held` are the splits."""

    def __init__(self, shared: Shared, members: Sequence[Member], programs: Programs):
        """Takes all runs of the program."""
        self._shared, self._members, self._programs = shared, members, programs
        self._metric = members[0].scorer.task.metric
        self._texts: Callable[..., dict[str, float]] | None = None

    def has(self, split: str) -> bool:
        """Returns whether there is a split."""
        return split in self._members[0].held

    def value(self, dev: dict[str, float]) -> float:
        """Returns the selection score; higher is better."""
        return dev[self._metric]

    def score(
        self, split: str, rows: Sequence[int], trainable: Flat, per_run: PerRun,
        devs: Sequence[Mapping[str, float]] | None = None,
    ) -> list[dict[str, float] | InputError]:  # fmt: skip
        """Returns the metrics of the runs `rows` on a split, or their errors.

        `devs` are their metrics on dev, from which a head may have chosen a threshold.
        """
        members = [self._members[i] for i in rows]
        scorer, programs = members[0].scorer, self._programs
        if scorer.head.WRITES:
            return self._score_texts(split, members, trainable, per_run)
        parts = [m.held[split] for m in members]
        same = all(part is parts[0] for part in parts)
        # Runs with the same examples share one pass over them, and each scores it.
        laid = list(zip(members, parts, strict=True))[: 1 if same else None]
        passes = [(m.kept or FeatureCache(m.scorer)).read(part) for m, part in laid]
        example = scorer.one_batch(parts[0].rows[:1])
        prompt, trainable = programs.fold(trainable, example, per_run, len(rows))
        scores: list[Any] = [None] * len(members)
        laid_out = side_by_side(passes, scorer.layout)
        shared_kv = programs.front(prompt, trainable, per_run, len(rows))
        score = partial(
            programs.scores, prompt, trainable, per_run=per_run, runs=len(rows), is_shared=same,
            shared_kv=shared_kv,
        )  # fmt: skip
        found = ((each, score(each[0] if same else batch)) for each, batch in laid_out)
        for each, values in ahead(found):
            values = np.asarray(values, np.float32)  # [R, B, C]
            for row, part in enumerate(parts):
                if scores[row] is None:
                    # NaN, so that an example which no batch holds cannot pass for one with a score.
                    scores[row] = np.full((len(part.rows), *values.shape[2:]), np.nan, np.float32)
                at = each[0 if same else row].index
                scores[row][at[at >= 0]] = values[row][at >= 0]
        fitted = [scorer.fitted(dev) for dev in devs or [{}] * len(rows)]
        return [_measure(*given) for given in zip(fitted, parts, scores, strict=True)]

    def _score_texts(
        self, split: str, members: Sequence[Member], trainable: Flat, per_run: PerRun
    ) -> list[dict[str, float] | InputError]:
        """Generates the texts of each run, one run after another."""
        if self._texts is None:
            config, scorer = self._shared.config, members[0].scorer
            self._texts = build_measure(config, scorer, self._shared.placement)
        programs = self._programs
        scores: list[dict[str, float] | InputError] = []
        for row, member in enumerate(members):
            frozen = programs.frozen | {name: x[row] for name, x in per_run.frozen.items()}
            scores.append(self._texts(member.held[split], programs.pick(trainable, row), frozen))
        return scores


def _measure(scorer: Scorer, part: Split, scores: np.ndarray) -> dict[str, float] | InputError:
    """Returns the metrics of a run, or an error, with which other runs of the grid continue."""
    try:
        scorer.head.check_outputs(part.average(scores))
    except InputError as error:
        return error
    return scorer.measure(part, scores)
