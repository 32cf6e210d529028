"""A run that trains one prompt on several tasks (Liu et al. 2022, "P-Tuning v2", section 3.2).

The prompt and the backbone are shared; each task has its own head. At the end the run exports the
prompt once for each task, with the head of that task.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np
import optax

from jaxprompt import tree
from jaxprompt.build import initial_params
from jaxprompt.build.backbone import load_weights
from jaxprompt.build.check import check_config, check_metric_package
from jaxprompt.build.evaluation import make_metrics_fn
from jaxprompt.build.inheritance import init_notes
from jaxprompt.build.initial_params import init_params
from jaxprompt.build.layers import layer_notes, measure_work, separates_layers
from jaxprompt.build.method import prompt_starts
from jaxprompt.build.optimizer import make_milestones
from jaxprompt.build.placement import build_placement
from jaxprompt.build.prompt_artifact import pack_prompt
from jaxprompt.build.task import (
    build_objectives,
    make_task_data,
    open_checked_backbone,
    prepare_task,
    split_lines,
    train_batches,
)
from jaxprompt.config.load import with_overrides
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.artifact import write_artifact
from jaxprompt.data.text.encoded import Split
from jaxprompt.errors import InputError
from jaxprompt.files import read_json, user_path
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.parallel import processes
from jaxprompt.parallel.sharding import Placement
from jaxprompt.runs import record as records
from jaxprompt.runs.grid.expand import is_grid
from jaxprompt.runs.running import (
    PreparedWithWeights,
    RunStages,
    agreed_settings,
    init_train_state,
    make_result,
    run_stages,
)
from jaxprompt.runs.shared_steps import TaskBatches, TaskMix, make_shared_step, mix_tasks
from jaxprompt.scoring.metrics import selection_score
from jaxprompt.training.loop import Milestones
from jaxprompt.training.one_run import Feed, Job, TrainOutcome
from jaxprompt.training.run_record import BackboneRecord, SharedRecord, SharedTask
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.steps import TrainStep, make_train_step
from jaxprompt.tree import Flat

ScoreSplit: TypeAlias = Callable[[Split, Flat, Flat], dict[str, float]]  # see `make_metrics_fn`

_TASK_BLOCKS = ("task", "data", "head")  # of a config, that may differ between tasks


def train_shared_prompt(config: RunConfig, workdir: str) -> RunResult | None:
    """Trains one prompt on all tasks of a config. Returns the result."""
    return run_stages(SharedTrainStages(config, workdir))


def is_shared(config: RunConfig) -> bool:
    """Returns whether a config has several tasks that share a prompt."""
    return bool(config.shared.tasks)


def task_configs(config: RunConfig) -> dict[str, RunConfig]:
    """Returns the config of each task by its name.

    Raises InputError for two tasks with the same name, a file that cannot be read, and a field that
    all tasks share.
    """
    names = [Path(path).name.removesuffix(".json") for path in config.shared.tasks]
    repeated = [name for name in names if names.count(name) > 1]
    odd = [name for name in names if not name.replace("-", "").replace("_", "").isalnum()]
    if len(names) < 2:
        raise InputError(f"shared.tasks names {len(names)} task; give 2 or more, or train it alone")
    if repeated:
        raise InputError(
            f"shared.tasks: files have the same task name {', '.join(repeated[:1])!r}; rename one"
        )
    if odd:
        raise InputError(
            f"shared.tasks: a task name is the name of its file and may only have letters, digits, "
            f"- and _, not {', '.join(odd[:1])!r}; rename the file"
        )
    configs = {}
    for name, path in zip(names, config.shared.tasks, strict=True):
        fields = read_json(user_path(path), "a JSON file with the fields of the task")
        for field in fields:
            if field.split(".")[0] not in _TASK_BLOCKS:
                raise InputError(
                    f"{path}: {field} is shared by all tasks; give fields of "
                    f"{', '.join(_TASK_BLOCKS)} by their full names, e.g. "
                    '{"task.name": "conll2003"}'
                )
        try:
            configs[name] = with_overrides(config, [*fields.items(), ("shared.tasks", ())])
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
    return configs


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SharedTaskInputs:
    """The inputs of one of several tasks."""

    config: RunConfig
    scorer: Scorer
    splits: dict[str, Split]
    notes: tuple[str, ...]  # log lines about the examples
    record: SharedTask

    @property
    def metric(self) -> str:
        """The metric of the task, one of those that are averaged."""
        return self.scorer.task.metric


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Tasks:
    """The tasks that share a prompt, loaded and encoded; without backbone weights."""

    placement: Placement
    backbone: Backbone
    by_name: dict[str, SharedTaskInputs]
    mix: TaskMix
    milestones: Milestones

    def joined_scorer(self) -> Scorer:
        """Returns the scorer of the first task with the heads of all tasks, by task name."""
        first = next(iter(self.by_name.values())).scorer
        heads = {name: task.scorer.model.heads["main"] for name, task in self.by_name.items()}
        return first._replace(model=dataclasses.replace(first.model, heads=heads))

    def count_tokens(
        self, config: RunConfig, count_corpus: Callable[[Scorer], np.ndarray | None]
    ) -> np.ndarray | None:
        """Counts the tokens of all tasks for initialising a prompt; None if not needed."""
        counts = [
            initial_params.count_tokens(
                config, task.splits["train"], functools.partial(count_corpus, task.scorer)
            )
            for task in self.by_name.values()
        ]
        return _sum_counts(counts)

    def with_backbone(self, backbone: Backbone) -> "Tasks":
        """Returns a copy with a backbone whose weights are loaded."""
        by_name = {
            name: dataclasses.replace(task, scorer=task.scorer.with_backbone(backbone))
            for name, task in self.by_name.items()
        }
        return dataclasses.replace(self, backbone=backbone, by_name=by_name)


def _separates_layers(config: RunConfig, tasks: Tasks) -> bool:
    """Returns whether layers are separate arrays, see `build.layers`."""
    scorers = [task.scorer for task in tasks.by_name.values()]
    train_splits = [task.splits["train"] for task in tasks.by_name.values()]
    return separates_layers(
        tasks.backbone,
        tasks.placement,
        writes=any(scorer.generates for scorer in scorers),
        work=measure_work(config, tasks.milestones.total, scorers[0].layout, train_splits),
        trainable=config.trainable,
    )


def read_tasks(config: RunConfig) -> Tasks:
    """Loads and encodes the splits of all tasks of a config."""
    placement, configs = build_placement(config), task_configs(config)
    fields = {name: _task_fields(task_config) for name, task_config in configs.items()}
    processes.check_agreement(
        {
            f"{field} of {name}": value
            for name, values in fields.items()
            for field, value in values.items()
        }
    )
    by_name: dict[str, SharedTaskInputs] = {}
    for name, task_config in configs.items():
        backbone = open_checked_backbone(task_config, placement)
        try:
            build_placement(task_config)  # checks that the mesh divides its batches
            examples, scorer, splits = prepare_task(task_config, placement, backbone)
        except InputError as error:
            raise InputError(f"task {name}: {error}") from error
        record = SharedTask(**vars(make_task_data(examples, scorer)), fields=fields[name])
        by_name[name] = SharedTaskInputs(
            config=task_config, scorer=scorer, splits=splits, notes=examples.notes, record=record
        )
    _check_prompts(config, by_name)
    train_splits = {name: task.splits["train"] for name, task in by_name.items()}
    by_name = {
        name: dataclasses.replace(
            task, scorer=task.scorer.with_vocabulary_of(*train_splits.values())
        )
        for name, task in by_name.items()
    }
    if jax.process_count() > 1:
        # Every process reads all rows, and trains on its share of them.
        processes.check_agreement(
            {
                f"{part} of {name}": split.digest()
                for name, task in by_name.items()
                for part, split in task.splits.items()
            }
        )
    # All windows and copies of an example count, as in a run of one task.
    sizes = {name: len(split.rows) for name, split in train_splits.items()}
    batch_sizes = {name: task.config.data.batch for name, task in by_name.items()}
    mix = mix_tasks(sizes, batch_sizes, config.shared.temperature)
    return Tasks(
        placement=placement,
        # Tasks cannot change the block of the backbone, so all of those opened are equal.
        backbone=backbone,
        by_name=by_name,
        mix=mix,
        milestones=make_milestones(config.train, mix.steps_per_epoch, mix.mean_batch),
    )


def _check_prompts(config: RunConfig, tasks: Mapping[str, SharedTaskInputs]) -> None:
    """Raises InputError for a method that depends on the task, or has its own objective."""
    prompts = {name: task.scorer.model.prompt for name, task in tasks.items()}
    first = next(iter(prompts))
    others = [name for name, prompt in prompts.items() if prompt != prompts[first]]
    if others:
        raise InputError(
            f"prompt.name={config.prompt.name} depends on the task, so {first} and "
            f"{', '.join(others)} cannot share it; use e.g. prefix or soft"
        )
    if prompts[first].objectives():
        raise InputError(
            f"prompt.name={config.prompt.name} has an additional objective, which tasks cannot "
            "share; with dart set prompt.fluency=0, or use another method"
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PreparedTasks(PreparedWithWeights[SharedRecord]):
    """The examples of all tasks, and the backbone."""

    tasks: Tasks


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TasksJob(Job):
    """A job that trains on several tasks."""

    scores: dict[str, ScoreSplit]  # by task


class SharedTrainStages(RunStages[SharedRecord, PreparedTasks, TasksJob]):
    """Trains on batches of all tasks, and selects the step with the best mean dev metric."""

    DONE, RECORD = "trained", SharedRecord

    def check(self) -> None:
        """Checks the config of each task."""
        config = self.config
        if is_grid(config):
            raise InputError(
                "config.runs and shared.tasks are both set, but a grid trains runs of one task; "
                "empty one of the two"
            )
        if "labels" in prompt_starts(config):
            raise InputError(
                "prompt.start=labels uses the label words of one task; use vocab or text"
            )
        if config.cache.location:
            raise InputError(
                f"cache.location={config.cache.location} caches states of one task; empty it for "
                "shared.tasks"
            )
        for name, task_config in task_configs(config).items():
            try:
                check_config(task_config)
                check_metric_package(task_config)
            except InputError as error:
                raise InputError(f"task {name}: {error}") from error

    def prepare(self, saved: SharedRecord | None, resume_step: int | None) -> PreparedTasks:
        """Loads and encodes the splits of all tasks, and loads the backbone."""
        del saved, resume_step
        tasks = read_tasks(self.config)
        backbone, loaded = load_weights(
            tasks.backbone, tasks.placement, separate_layers=_separates_layers(self.config, tasks)
        )
        tasks = tasks.with_backbone(backbone)
        record = SharedRecord(
            tasks={name: task.record for name, task in tasks.by_name.items()},
            seen=tasks.joined_scorer().model.prompt.seen,
            backbone=BackboneRecord(backbone.family, loaded.report.fingerprint),
            **records.init_fields(self.config),
        )
        return PreparedTasks(
            placement=tasks.placement,
            steps_per_epoch=tasks.mix.steps_per_epoch,
            milestones=tasks.milestones,
            settings=self.config.train,
            record=record,
            tasks=tasks,
            loaded=loaded,
        )

    def build(self, prepared: PreparedTasks) -> TasksJob:
        """Initialises the prompt and the heads."""
        config, tasks, placement = self.config, prepared.tasks, prepared.placement
        scorer = tasks.joined_scorer()
        counts = tasks.count_tokens(
            config, lambda scorer: initial_params.count_corpus(config, scorer, self.workdir)
        )
        weights = init_params(config, scorer, prepared.loaded, counts, placement)
        scores = {
            name: make_metrics_fn(task.config, task.scorer, placement)
            for name, task in tasks.by_name.items()
        }
        tx, state = init_train_state(config, prepared, weights.trainable)
        steps = {
            name: _make_task_step(name, task, scorer.model, tx)
            for name, task in tasks.by_name.items()
        }
        return TasksJob(
            step=make_shared_step(steps),
            state=state,
            frozen=weights.frozen,
            feed=functools.partial(_feed, tasks, config.seed),
            measure=lambda trainable: _score_tasks(
                "dev", tasks.by_name, scores, trainable, weights.frozen
            ),
            metric="mean",
            value=lambda dev: dev["mean"],
            scores=scores,
        )

    def lines(self, prepared: PreparedTasks, job: TasksJob, start_message: str) -> Iterator[str]:
        """Yields log lines: what was read of each task, and what trains."""
        config, tasks, backbone = self.config, prepared.tasks, prepared.record.backbone
        weights = backbone.fingerprint[:12]
        yield f"backbone {config.backbone.path} ({backbone.family}), weights {weights}"
        yield from init_notes(config, tasks.joined_scorer().model.backbone.dims)
        for name, task in tasks.by_name.items():
            share = tasks.mix.shares[name]
            yield f"task {name}, template {task.scorer.template!r}, {share:.1%} of the steps"
            yield from split_lines(task.scorer, task.splits, task.notes)
        yield tree.parameter_table(job.state.trainable, job.frozen)
        yield f"{prepared.milestones.total} steps, {start_message}"
        yield from layer_notes(prepared.placement, job.frozen)

    def finish(self, prepared: PreparedTasks, job: TasksJob, outcome: TrainOutcome) -> RunResult:
        """Evaluates on test once, and exports the prompt with the head of each task."""
        config, tasks = self.config, prepared.tasks.by_name
        scorers = {
            name: task.scorer.fitted(_select_scores(outcome.best.dev, name))
            for name, task in tasks.items()
        }
        # A head with another threshold is another program; otherwise the compiled one is used.
        scores = job.scores | {
            name: make_metrics_fn(task.config, scorers[name], prepared.placement)
            for name, task in tasks.items()
            if scorers[name].head != task.scorer.head
        }
        test: dict[str, float] = {}
        if config.train.test:
            test = _score_tasks("test", tasks, scores, outcome.trainable, job.frozen)
        if processes.is_first():
            self._export(prepared, job, scorers, outcome, test)
        return make_result(
            config,
            job,
            outcome,
            method=config.prompt.name,
            tasks=tuple(tasks),
            dev=outcome.best.dev,
            test=test or None,
        )

    def _export(
        self,
        prepared: PreparedTasks,
        job: TasksJob,
        scorers: Mapping[str, Scorer],
        outcome: TrainOutcome,
        test: Mapping[str, float],
    ) -> None:
        family = prepared.tasks.backbone.family
        for name, scorer in scorers.items():
            config = prepared.tasks.by_name[name].config
            task_scores = {
                "dev": _select_scores(outcome.best.dev, name),
                "test": _select_scores(test, name),
            }
            tensors, metadata = pack_prompt(
                scorer,
                _select_params(outcome.trainable, name),
                _select_params(job.frozen, name),
                backbone=dataclasses.replace(config.backbone, family=family),
                fingerprint=prepared.loaded.report.fingerprint,
                config=config,
                metrics={split: values for split, values in task_scores.items() if values},
            )
            metadata = dataclasses.replace(metadata, init=prepared.record.init)
            write_artifact(Path(self.workdir) / "export" / name, tensors, metadata)


def _feed(tasks: Tasks, seed: int) -> Feed:
    streams = {
        name: train_batches(task.config, task.scorer, task.splits["train"])
        for name, task in tasks.by_name.items()
    }
    batches = TaskBatches(streams, tasks.mix.shares, seed=seed)
    return Feed(batches, lambda: next(batches))


def _make_task_step(
    name: str, task: SharedTaskInputs, model: Model, tx: optax.GradientTransformation
) -> TrainStep:
    """Returns the train step of a task; `model` has the heads of all tasks."""
    objectives = build_objectives(task.config, task.scorer.model)
    terms = [term._replace(head=name) for term in objectives]
    return make_train_step(model, tx, terms, accumulate=task.config.optim.accumulate)


def _score_tasks(
    split: str,
    tasks: Mapping[str, SharedTaskInputs],
    scores: Mapping[str, ScoreSplit],
    trainable: Flat,
    frozen: Flat,
) -> dict[str, float]:
    """Evaluates a split of every task, and averages their metrics."""
    values: dict[str, float] = {}
    task_metrics: list[float] = []
    for name, task in tasks.items():
        if split not in task.splits:
            continue
        params = [_select_params(flat, name) for flat in (trainable, frozen)]
        task_scores = scores[name](task.splits[split], *params)
        task_metrics.append(selection_score(task_scores, task.metric))
        values |= {f"{name}/{metric}": value for metric, value in task_scores.items()}
    # Each task has the same weight, whatever its size. A mean needs all tasks.
    if len(task_metrics) < len(tasks):
        return values
    return {"mean": sum(task_metrics) / len(task_metrics), **values}


def _task_fields(config: RunConfig) -> dict[str, str]:
    """Returns the fields that differ between tasks, without file paths."""
    return {
        field: value
        for field, value in agreed_settings(config).items()
        if field.split(".")[0] in _TASK_BLOCKS
    }


def _select_scores(scores: Mapping[str, float], name: str) -> dict[str, float]:
    """Returns the scores of one task by their plain names."""
    return {
        key.partition("/")[2]: value for key, value in scores.items() if key.startswith(f"{name}/")
    }


def _select_params(flat: Flat, name: str) -> Flat:
    """Returns the parameters that one task uses, with its head as the only one."""
    prefix = f"head/{name}/"
    return {
        path.replace(prefix, "head/main/", 1): value
        for path, value in flat.items()
        if path.startswith(prefix) or not path.startswith("head/")
    }


def _sum_counts(counts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Adds the token counts of all tasks, each [its largest id + 1]; None if not needed."""
    token_counts = [ids for ids in counts if ids is not None]
    if len(token_counts) < len(counts):
        return None
    size = max(map(len, token_counts))
    return np.sum([np.pad(ids, (0, size - len(ids))) for ids in token_counts], axis=0)
