"""A run that trains on the examples of a task."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

import jax

from jaxprompt import tree
from jaxprompt.build.backbone import NO_INPUTS, InMemoryInputs
from jaxprompt.build.check import check_config
from jaxprompt.build.evaluation import make_metrics_fn
from jaxprompt.build.inheritance import init_notes
from jaxprompt.build.initial_params import count_corpus, count_tokens, init_params
from jaxprompt.build.optimizer import config_milestones
from jaxprompt.build.placement import build_placement, kernel_notes
from jaxprompt.build.task import (
    build_objectives,
    cache_shared_prefix,
    make_task_data,
    open_checked_backbone,
    prepare_task,
    split_lines,
    train_batches,
)
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.load import Loaded
from jaxprompt.data.rows import Rows
from jaxprompt.data.text.encoded import Split
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.parallel import processes
from jaxprompt.parallel.sharding import Placement
from jaxprompt.runs import record as records
from jaxprompt.runs.running import (
    PreparedWithWeights,
    RunStages,
    init_train_state,
    make_result,
    run_stages,
)
from jaxprompt.training.features.cache import FeatureCache, plan_feature_cache
from jaxprompt.training.loop import Milestones
from jaxprompt.training.one_run import Feed, Job, TrainOutcome
from jaxprompt.training.run_record import BackboneRecord, TaskData, TaskRecord
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.steps import make_train_step
from jaxprompt.tree import Flat


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
    steps_per_epoch = -(-num_rows // config.data.batch)
    return TaskInputs(
        scorer=scorer,
        splits=splits,
        notes=examples.notes,
        data=make_task_data(examples, scorer),
        steps_per_epoch=steps_per_epoch,
        milestones=config_milestones(config, steps_per_epoch, num_rows),
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
        backbone, loaded = self.inputs.load(backbone, placement)
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
            value=lambda dev: dev[scorer.task.metric],
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
        yield f"task {scorer.task.name}, template {scorer.template!r}"
        yield from split_lines(scorer, prepared.splits, prepared.notes)
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
