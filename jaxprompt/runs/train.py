"""A run that trains on the examples of a task."""

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxprompt import tree
from jaxprompt.build.backbone import NO_INPUTS, InMemoryInputs, load_weights
from jaxprompt.build.check import check_config
from jaxprompt.build.evaluation import make_metrics_fn
from jaxprompt.build.examples import examples_key
from jaxprompt.build.inheritance import init_notes
from jaxprompt.build.initial_params import InitialParams, count_corpus, count_tokens, init_params
from jaxprompt.build.layers import layer_notes, measure_work, separates_layers
from jaxprompt.build.method import get_method
from jaxprompt.build.optimizer import config_milestones
from jaxprompt.build.placement import build_placement, kernel_notes
from jaxprompt.build.task import (
    build_objectives,
    cache_shared_prefix,
    count_train_rows,
    longest_batch,
    make_task_data,
    open_checked_backbone,
    prepare_task,
    task_lines,
    train_batches,
)
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.load import Loaded
from jaxprompt.data.rows import Rows
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.parallel import processes
from jaxprompt.parallel.sharding import Placement
from jaxprompt.prompts import with_task
from jaxprompt.runs import record as records
from jaxprompt.runs.grid.batched_steps import PerRun, Programs
from jaxprompt.runs.grid.expand import GridRun
from jaxprompt.runs.grid.group import GroupInputs, Member, label_word_arrays, side_by_side
from jaxprompt.runs.running import (
    PreparedWithWeights,
    RunStages,
    init_train_state,
    make_result,
    run_stages,
)
from jaxprompt.scoring.metrics import selection_score
from jaxprompt.training.evaluation import dispatch_ahead
from jaxprompt.training.features.cache import FeatureCache, FeatureCachePlan, plan_feature_cache
from jaxprompt.training.loop import Milestones
from jaxprompt.training.one_run import Feed, Job, TrainOutcome
from jaxprompt.training.run_record import BackboneRecord, TaskData, TaskRecord
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.steps import make_train_step
from jaxprompt.tree import Flat
from jaxprompt.types import TaskInfo


def train_prompt(
    config: RunConfig, workdir: str, inputs: InMemoryInputs = NO_INPUTS
) -> RunResult | None:
    """Runs `train` in a workdir. Returns the result, see `running.run_stages`."""
    return run_stages(TrainStages(config, workdir, inputs))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TaskInputs:
    """The examples of a run, loaded and encoded; without backbone weights."""

    scorer: Scorer
    splits: dict[str, Split]
    notes: tuple[str, ...]  # of the reading of examples
    data: TaskData
    steps_per_epoch: int
    milestones: Milestones


def read_inputs(
    config: RunConfig,
    placement: Placement,
    backbone: Backbone,
    rows: Mapping[str, Rows] | None = None,
) -> TaskInputs:
    """Loads and encodes the splits of a config; `rows` by split replace its files."""
    examples, scorer, splits = prepare_task(config, placement, backbone, rows)
    scorer = cache_shared_prefix(config, scorer).with_vocabulary_of(splits["train"])
    num_rows = len(splits["train"].rows)
    steps_per_epoch = -(-count_train_rows(config, scorer, splits["train"]) // config.data.batch)
    return TaskInputs(
        scorer=scorer,
        splits=splits,
        notes=examples.notes,
        data=make_task_data(examples, scorer),
        steps_per_epoch=steps_per_epoch,
        milestones=config_milestones(config, steps_per_epoch, num_rows),
    )


def _separates_layers(
    config: RunConfig, inputs: TaskInputs, placement: Placement, backbone: Backbone, runs: int = 1
) -> bool:
    """Returns whether layers are separate arrays, see `build.layers`; `runs` train at once."""
    scorer, train = inputs.scorer, inputs.splits["train"]
    work = measure_work(config, inputs.milestones.total, scorer.layout, [train], runs)
    return separates_layers(
        backbone,
        placement,
        writes=scorer.generates,
        work=work,
        trainable=config.trainable,
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PreparedTask(PreparedWithWeights[TaskRecord]):
    """The examples of a task, and the backbone."""

    backbone: Backbone
    scorer: Scorer
    splits: dict[str, Split]
    notes: tuple[str, ...]  # of the reading of examples


def make_prepared_task(
    config: RunConfig, inputs: TaskInputs, placement: Placement, backbone: Backbone, loaded: Loaded
) -> PreparedTask:
    """Combines the inputs of a run and its backbone weights."""
    data = dataclasses.replace(inputs.data, seen=inputs.scorer.model.prompt.seen)
    backbone_record = BackboneRecord(backbone.family, loaded.report.fingerprint)
    return PreparedTask(
        placement=placement,
        steps_per_epoch=inputs.steps_per_epoch,
        milestones=inputs.milestones,
        settings=config.train,
        record=TaskRecord(**vars(data), backbone=backbone_record, **records.init_fields(config)),
        backbone=backbone,
        loaded=loaded,
        scorer=inputs.scorer.with_backbone(backbone),
        splits=inputs.splits,
        notes=inputs.notes,
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TaskJob(Job):
    """A job that trains on a task."""

    cache: FeatureCache
    score: Callable[[Split, Flat, Flat], dict[str, float]]  # see `make_metrics_fn`


class TrainStages(RunStages[TaskRecord, PreparedTask, TaskJob]):
    """Trains on the train split, selects on dev, and evaluates on test once."""

    DONE, RECORD = "trained", TaskRecord

    def __init__(self, config: RunConfig, workdir: str, inputs: InMemoryInputs):
        super().__init__(config, workdir)
        self.inputs = inputs

    def check(self) -> None:
        """Checks the config."""
        check_config(self.config)

    def prepare(self, saved: TaskRecord | None, resume_step: int | None) -> PreparedTask:
        """Loads and encodes the splits, and loads the backbone."""
        # `check_same_data` compares the records later.
        del saved, resume_step
        config = self.config
        placement = build_placement(config)
        backbone = open_checked_backbone(config, placement)
        inputs = read_inputs(config, placement, backbone, self.inputs.rows)
        if jax.process_count() > 1:
            # Every process reads all rows, and trains on its share of them.
            rows = {f"the rows of {name}": split.digest() for name, split in inputs.splits.items()}
            processes.check_agreement(rows)
        separate_layers = _separates_layers(config, inputs, placement, backbone)
        backbone, loaded = self.inputs.load(backbone, placement, separate_layers=separate_layers)
        return make_prepared_task(config, inputs, placement, backbone, loaded)

    def build(self, prepared: PreparedTask) -> TaskJob:
        """Initialises new parameters, and plans which hidden states are cached."""
        config, scorer, splits = self.config, prepared.scorer, prepared.splits
        placement = prepared.placement
        counts = count_tokens(
            config, splits["train"], lambda: count_corpus(config, scorer, self.workdir)
        )
        weights = init_params(config, scorer, prepared.loaded, counts, placement)
        cache, fill = plan_feature_cache(config, scorer, splits, weights, placement, self.workdir)
        score = make_metrics_fn(config, scorer, placement, cache)
        tx, state = init_train_state(config, prepared, weights.trainable)
        objectives = build_objectives(config, scorer.model)
        return TaskJob(
            step=make_train_step(cache.model, tx, objectives, accumulate=config.optim.accumulate),
            state=state,
            frozen=weights.frozen,
            feed=functools.partial(_feed, config, scorer, splits["train"], cache),
            measure=lambda trainable: score(splits["dev"], trainable, weights.frozen),
            metric=scorer.task.metric,
            value=functools.partial(selection_score, metric=scorer.task.metric),
            fill_cache=fill,
            cache=cache,
            score=score,
        )

    def lines(self, prepared: PreparedTask, job: TaskJob, start_message: str) -> Iterator[str]:
        """Yields log lines: what was read, what trains, and what is randomly initialised."""
        config, scorer, report = self.config, prepared.scorer, prepared.loaded.report
        trainable, family = job.state.trainable, prepared.backbone.family
        yield f"backbone {config.backbone.path} ({family}), weights {report.fingerprint[:12]}"
        yield f"  heads in the checkpoint: {', '.join(report.heads) or 'none'}"
        if report.unused:
            examples = ", ".join(report.unused[:5])
            yield f"  unused tensors in the checkpoint: {len(report.unused)}, e.g. {examples}"
        if report.requantized:
            quantize = config.backbone.quantize
            yield f"  {report.requantized} matrices of the file were quantised again, to {quantize}"
        yield from init_notes(config, scorer.model.backbone.dims)
        yield from task_lines(scorer, prepared.splits, prepared.notes)
        yield tree.parameter_table(trainable, job.frozen)
        new_heads = sorted(
            {"/".join(path.split("/")[:3]) for path in trainable if path.startswith("head/")}
        )
        if new_heads and config.train.init_head:
            yield f"head initialised from {config.prompt.get('init')}: {', '.join(new_heads)}"
        elif new_heads:
            yield f"randomly initialised: {', '.join(new_heads)}"
        yield f"{prepared.milestones.total} steps, {start_message}"
        yield from kernel_notes(config, prepared.placement, prepared.backbone)
        yield from layer_notes(prepared.placement, job.frozen)

    def finish(self, prepared: PreparedTask, job: TaskJob, outcome: TrainOutcome) -> RunResult:
        """Evaluates on test once, with the best parameters."""
        config, scorer, dev = self.config, prepared.scorer, outcome.best.dev
        has_test = config.train.test and "test" in prepared.splits
        fitted_scorer, score = scorer.fitted(dev), job.score
        # A head that chose e.g. a threshold on dev is another program.
        if fitted_scorer.head != scorer.head:
            score = make_metrics_fn(config, fitted_scorer, prepared.placement, job.cache)
        test = score(prepared.splits["test"], outcome.trainable, job.frozen) if has_test else None
        return make_result(config, job, outcome, method=config.prompt.name, dev=dev, test=test)


def _feed(config: RunConfig, scorer: Scorer, train: Split, cache: FeatureCache) -> Feed:
    """Returns the training batches, with cached states if there are any."""
    batches = train_batches(config, scorer, train)
    return Feed(batches, lambda: cache.add_states(train, next(batches)))


# -- grids ----------------------------------------------------------------------------------------

_OTHER_WORDS = (
    "prompt.name={} depends on the label words, so all runs of a grid must share them, but this "
    "run has other words than the first; train it in a separate grid"
)


def prepare_task_group(
    runs: Sequence[GridRun], workdir: Path, mark_failed: Callable[[GridRun, Exception], None]
) -> tuple[GroupInputs, list[Member]]:
    """Loads the inputs of runs that differ only in fields of `expand.VARIES`.

    Equal inputs are loaded and encoded once. Invalid runs are passed to `mark_failed`.
    """
    config = runs[0].config
    placement = build_placement(config)
    # How each run is initialised is checked by `check_prompt_init`.
    backbone = open_checked_backbone(config, placement, restored=True)
    backbone = backbone._replace(tokenizer=load_tokenizer(backbone.folder))
    pairs = _read_inputs(runs, placement, backbone, mark_failed)
    separate_layers = bool(pairs) and _separates_layers(
        config, pairs[0][1], placement, backbone, runs=len(pairs)
    )
    backbone, loaded = load_weights(backbone, placement, separate_layers=separate_layers)
    corpus = functools.cache(lambda: count_corpus(config, pairs[0][1].scorer, workdir))
    models: dict[str, Model] = {}
    members = []
    for run, inputs in pairs:
        prompt, task_info = get_method(run.config, backbone.module.dims), _task_info(inputs.scorer)
        if task_info != _task_info(pairs[0][1].scorer):
            mark_failed(run, InputError(_OTHER_WORDS.format(run.config.prompt.name)))
            continue
        scorer = inputs.scorer.with_prompt(with_task(prompt, task_info))
        scorer = scorer.with_vocabulary_of(inputs.splits["train"])
        inputs = dataclasses.replace(inputs, scorer=scorer)
        member = _member(run, make_prepared_task(run.config, inputs, placement, backbone, loaded))
        counts = count_tokens(run.config, inputs.splits["train"], corpus)
        members.append(_with_shared_model(member._replace(counts=counts), models))
    members, fill = _plan_caches(config, members, loaded, placement, workdir)
    for member in members:
        records.check_same_data(member.run.folder, member.record)
    lines = [f"backbone {backbone.config.path} ({backbone.family})"]
    lines += kernel_notes(config, placement, backbone)
    lines += layer_notes(placement, loaded.params)
    lines += _example_lines(pairs)
    objectives = build_objectives(config, members[0].model) if members else []
    shared = GroupInputs(config, placement, loaded, objectives, SplitScorer, lines)
    return shared._replace(fill=fill), members


def _read_inputs(
    runs: Sequence[GridRun],
    placement: Placement,
    backbone: Backbone,
    mark_failed: Callable[[GridRun, Exception], None],
) -> list[tuple[GridRun, TaskInputs]]:
    """Loads and encodes the examples of runs, equal ones once. Returns runs with their examples."""
    splits_by_digest: dict[tuple[str, str], Split] = {}
    inputs_by_key: dict[str, TaskInputs] = {}
    pairs = []
    for run in runs:
        key = examples_key(run.config)
        try:
            if key not in inputs_by_key:
                inputs = read_inputs(run.config, placement, backbone)
                # A split that is the same in all runs is batched once.
                splits = {
                    name: splits_by_digest.setdefault((name, split.digest()), split)
                    for name, split in inputs.splits.items()
                }
                inputs_by_key[key] = dataclasses.replace(inputs, splits=splits)
        except InputError as error:
            mark_failed(run, error)
            continue
        pairs.append((run, inputs_by_key[key]))
    return pairs


def _with_shared_model(member: Member, models: dict[str, Model]) -> Member:
    """Replaces the model of a member by an equal one of `models`, so that programs are shared."""
    model, words = member.model, [array.tolist() for array in jax.tree.leaves(member.words)]
    key = json.dumps([model.prompt.block(), member.scorer.classes, words, model.shared_prefix])
    model = models.setdefault(key, model)
    return member._replace(scorer=member.scorer._replace(model=model), model=model)


def _example_lines(pairs: Sequence[tuple[GridRun, TaskInputs]]) -> list[str]:
    """Returns log lines about the examples of runs, with the name of a run if they differ."""
    first_runs: dict[int, tuple[str, TaskInputs]] = {}  # of those with the same examples
    for run, inputs in pairs:
        first_runs.setdefault(id(inputs), (run.name, inputs))
    lines_by_run = {
        name: task_lines(inputs.scorer, inputs.splits, inputs.notes)
        for name, inputs in first_runs.values()
    }
    counts = Counter(line for lines in lines_by_run.values() for line in set(lines))

    def is_common(line):
        return counts[line] == len(lines_by_run)

    lines = list(filter(is_common, next(iter(lines_by_run.values()), [])))
    for name, run_lines in lines_by_run.items():
        lines += [f"  {name}: {line.strip()}" for line in run_lines if not is_common(line)]
    return lines


def _plan_caches(
    config: RunConfig,
    members: Sequence[Member],
    loaded: Loaded,
    placement: Placement,
    workdir: Path,
) -> tuple[list[Member], Callable[..., None]]:
    """Plans the feature cache of runs, once for equal rows. Returns (members, fill).

    Raises InputError if a run cannot cache states, or all exceed the limit.
    """
    plan = FeatureCachePlan(config, placement, workdir, several=True)
    weights: dict[int, InitialParams] = {}  # by model; only frozen layers are read
    cached_members = []
    for member in members:
        config_of_run, model = member.run.config, id(member.model)
        if plan.is_enabled and model not in weights:
            weights[model] = init_params(
                config_of_run, member.scorer, loaded, member.counts, placement, restored=True
            )
        cache = plan.add(member.scorer, member.eval_data, weights.get(model))
        cached_members.append(member._replace(cache=cache))
    plan.check()

    def fill(members: Sequence[Member], log: Callable[[str], None]) -> None:
        # In the order of the runs, each split once.
        parts = list(dict.fromkeys(part for m in members if m.cache for part in m.cache.splits))
        plan.open(parts)
        plan.fill(parts, next(iter(weights.values()), None), log)

    return cached_members, fill


def _task_info(scorer: Scorer) -> TaskInfo:
    """Returns what the method reads of the task; empty if it does not depend on the task."""
    return getattr(scorer.model.prompt, "task_info", TaskInfo())


def _member(run: GridRun, prepared: PreparedTask) -> Member:
    config, scorer, train = run.config, prepared.scorer, prepared.splits["train"]
    prompt = scorer.model.prompt
    return Member(
        run,
        scorer,
        scorer.model,
        prepared.milestones,
        prepared.steps_per_epoch,
        # A program depends on the words of the training text, and on the method's operations.
        shape=(
            prepared.steps_per_epoch,
            scorer.layout,
            scorer.classes,
            str(jax.tree.map(np.shape, label_word_arrays(scorer.model))),
            prompt.seen,
            prompt.static_values(),
        ),
        source=train,
        # Cached states are added once the batches of all runs are known.
        feed=functools.partial(_feed, config, scorer, train, FeatureCache(scorer)),
        longest=functools.partial(longest_batch, config, scorer, train),
        eval_data=prepared.splits,
        record=prepared.record,
    )


class SplitScorer:
    """Evaluates runs of one program on splits. `Member.eval_data` are the splits."""

    def __init__(self, shared: GroupInputs, members: Sequence[Member], programs: Programs):
        """Takes all runs of the program."""
        self._shared, self._members, self._programs = shared, members, programs
        self.metric = members[0].scorer.task.metric
        self._texts: Callable[..., dict[str, float]] | None = None

    def has(self, split: str) -> bool:
        """Returns whether there is a split."""
        return split in self._members[0].eval_data

    def value(self, dev: dict[str, float]) -> float:
        """Returns the selection score; higher is better."""
        return selection_score(dev, self.metric)

    def score(
        self,
        split: str,
        rows: Sequence[int],
        trainable: Flat,
        per_run: PerRun,
        devs: Sequence[Mapping[str, float]] | None = None,
    ) -> list[dict[str, float] | InputError]:
        """Returns the metrics of the runs `rows` on a split, or their errors.

        `devs` are their metrics on dev, from which a head may have chosen a threshold.
        """
        members = [self._members[i] for i in rows]
        scorer, programs = members[0].scorer, self._programs
        if scorer.generates:
            return self._score_texts(split, members, trainable, per_run)
        splits = [member.eval_data[split] for member in members]
        is_shared = all(encoded is splits[0] for encoded in splits)
        # Runs with the same examples share one pass over them.
        pairs = list(zip(members, splits, strict=True))[: 1 if is_shared else None]
        passes = [
            (member.cache or FeatureCache(member.scorer)).batches(encoded)
            for member, encoded in pairs
        ]
        example = scorer.one_batch(splits[0].rows[:1])
        prompt, trainable = programs.fold(trainable, example, per_run, len(rows))
        scores: list[Any] = [None] * len(members)
        stacked_batches = side_by_side(passes, scorer.layout)
        score = functools.partial(
            programs.scores,
            prompt,
            trainable,
            per_run=per_run,
            runs=len(rows),
            is_shared=is_shared,
            prefix_kv=programs.shared_prefix(prompt, trainable, per_run, len(rows)),
        )
        scored_batches = (
            (batches, score(batches[0] if is_shared else batch))
            for batches, batch in stacked_batches
        )
        for batches, batch_scores in dispatch_ahead(scored_batches):
            batch_scores = np.asarray(batch_scores, np.float32)  # [R, B, C]
            for row, encoded in enumerate(splits):
                if scores[row] is None:
                    # NaN, so that an example without a batch is noticed.
                    scores[row] = np.full(
                        (len(encoded.rows), *batch_scores.shape[2:]), np.nan, np.float32
                    )
                indices = batches[0 if is_shared else row].index
                scores[row][indices[indices >= 0]] = batch_scores[row][indices >= 0]
        fitted = [scorer.fitted(dev) for dev in devs or [{}] * len(rows)]
        return [_score_run(*run_inputs) for run_inputs in zip(fitted, splits, scores, strict=True)]

    def _score_texts(
        self, split: str, members: Sequence[Member], trainable: Flat, per_run: PerRun
    ) -> list[dict[str, float] | InputError]:
        """Generates the texts of each run, one run after another."""
        if self._texts is None:
            config, scorer = self._shared.config, members[0].scorer
            self._texts = make_metrics_fn(config, scorer, self._shared.placement)
        programs = self._programs
        scores: list[dict[str, float] | InputError] = []
        for row, member in enumerate(members):
            frozen = programs.frozen | {name: x[row] for name, x in per_run.frozen.items()}
            scores.append(
                self._texts(member.eval_data[split], programs.select_run(trainable, row), frozen)
            )
        return scores


def _score_run(scorer: Scorer, split: Split, scores: np.ndarray) -> dict[str, float] | InputError:
    """Returns the metrics of a run, or an error, with which other runs of the grid continue."""
    try:
        scorer.head.check_outputs(split.average(scores))
    except InputError as error:
        return error
    return scorer.measure(split, scores)
