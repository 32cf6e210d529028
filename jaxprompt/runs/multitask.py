"""A run in which several tasks train one prompt (Liu et al. 2022, "P-Tuning v2", section 3.2).

The prompt and the backbone are shared, and each task has a linear head, or another, of its own. At
its end the run exports the prompt once for each task, with that task's head.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxprompt import tree
from jaxprompt.build import initial_params
from jaxprompt.build.backbone import NOTHING
from jaxprompt.build.check import check_config
from jaxprompt.build.evaluation import build_measure
from jaxprompt.build.inheritance import tell_init
from jaxprompt.build.initial_params import start
from jaxprompt.build.method import starts_of
from jaxprompt.build.optimizer import make_plan
from jaxprompt.build.placement import build_placement
from jaxprompt.build.prompt_artifact import pack
from jaxprompt.build.task import (
    build_objectives,
    make_task_data,
    open_fitting,
    prepare_task,
    tell_examples,
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
from jaxprompt.runs import record as records
from jaxprompt.runs.grid.expand import is_grid
from jaxprompt.runs.running import Work, carry_out
from jaxprompt.runs.running import facts as facts_of
from jaxprompt.runs.shared_steps import TaskBatch, TaskBatches, make_shared_step
from jaxprompt.training.log import RunLog
from jaxprompt.training.one_run import Ended
from jaxprompt.training.run_record import BackboneRecord, SharedRecord, SharedTask
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.steps import TrainStep, make_train_step
from jaxprompt.tree import Flat

_BLOCKS = ("task", "data", "head")  # of a config, that are a task's own


def run(config: RunConfig, workdir: str) -> RunResult | None:
    """Tunes one prompt on all tasks of a config in a workdir. -> the result"""
    return carry_out(SharedTuning(config, workdir))


def is_shared(config: RunConfig) -> bool:
    """Tells whether a config has several tasks that share a prompt."""
    return bool(config.shared.tasks)


def task_configs(config: RunConfig) -> dict[str, RunConfig]:
    """Makes the config of each task, by its name.

    Raises InputError for two tasks with one name, a file that cannot be read, and a field that is
    not a task's own.
    """
    configs: dict[str, RunConfig] = {}
    paths: dict[str, str] = {}
    for path in config.shared.tasks:
        name = Path(path).name.removesuffix(".json")
        if name in configs:
            raise InputError(
                f"shared.tasks: {paths[name]} and {path} are two tasks with one name, {name!r}; "
                "rename a file"
            )
        if not name.replace("-", "").replace("_", "").isalnum():
            raise InputError(
                f"shared.tasks: a task is called by its file, and {name!r} has more than letters, "
                "digits, - and _; rename it"
            )
        fields = read_json(user_path(path), "a JSON file of the task's own fields")
        odd = next((field for field in fields if field.split(".")[0] not in _BLOCKS), None)
        if odd is not None:
            raise InputError(
                f"{path}: {odd} is shared by all tasks; give fields of {', '.join(_BLOCKS)}, by "
                'their whole names, as in {"task.name": "conll2003"}'
            )
        try:
            task_config = with_overrides(config, [*fields.items(), ("shared.tasks", ())])
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        configs[name], paths[name] = task_config, path
    if len(configs) < 2:
        raise InputError(
            f"shared.tasks names {len(configs)} task; give 2 or more, or train it alone"
        )
    return configs


class SharedTuning(Work[SharedRecord]):
    """Trains on all tasks in turns, chooses by the mean of their metrics on dev."""

    DONE, RECORD = "trained", SharedRecord
    backbone: Backbone

    def check(self) -> None:
        """Checks the config of each task."""
        config = self.config
        if is_grid(config):
            raise InputError(
                "config.runs and shared.tasks are both given, and a grid trains runs of one task; "
                "empty one of the two"
            )
        self.configs = task_configs(config)
        for name, task_config in self.configs.items():
            try:
                check_config(task_config)
            except InputError as error:
                raise InputError(f"task {name}: {error}") from error
        if "labels" in starts_of(config):
            raise InputError(
                "prompt.start=labels takes the label words of one task; take vocab or text"
            )
        if config.cache.where:
            raise InputError(
                f"cache.where={config.cache.where} keeps states of one task; empty it for "
                "shared.tasks"
            )

    def prepare(self, saved: SharedRecord | None, started: int | None) -> None:
        """Reads and encodes the splits of all tasks, and reads the backbone."""
        del saved, started
        config = self.config
        self.read()
        self.backbone, self.loaded = NOTHING.load(self.backbone, self.placement)
        for name, scorer in self.scorers.items():
            self.scorers[name] = scorer.with_backbone(self.backbone)
        backbone = BackboneRecord(self.backbone.family, self.loaded.report.fingerprint)
        seen = next(iter(self.scorers.values())).model.prompt.seen
        self.record = records.make_shared_record(config, self.tasks, seen, backbone)

    def read(self) -> None:
        """Reads and encodes the splits of all tasks; of the backbone no weights."""
        config = self.config
        placement = self.placement = build_placement(config)
        self.scorers: dict[str, Scorer] = {}
        self.splits: dict[str, dict[str, Split]] = {}
        self.notes: dict[str, tuple[str, ...]] = {}
        self.tasks: dict[str, SharedTask] = {}
        digests: dict[str, str] = {}
        fields = {name: _own_fields(task_config) for name, task_config in self.configs.items()}
        processes.agree(
            {f"{at} of {name}": x for name, values in fields.items() for at, x in values.items()}
        )
        for name, task_config in self.configs.items():
            backbone = open_fitting(task_config, placement)
            try:
                build_placement(task_config)  # its batches must divide as well
                examples, scorer, splits = prepare_task(task_config, placement, backbone)
            except InputError as error:
                raise InputError(f"task {name}: {error}") from error
            self.scorers[name], self.notes[name] = scorer, examples.notes
            self.splits[name] = splits
            data = make_task_data(examples, scorer)
            self.tasks[name] = SharedTask(**vars(data), fields=fields[name])
            digests |= {f"{part} of {name}": x.digest() for part, x in splits.items()}
        # Tasks may not change the block of the backbone, so any of those opened will do.
        self.backbone = backbone
        self._check_prompts()
        trains = [splits["train"] for splits in self.splits.values()]
        self.scorers = {
            name: scorer.with_vocabulary_of(*trains) for name, scorer in self.scorers.items()
        }
        if jax.process_count() > 1:
            # Every process reads for itself, and takes its share of the same rows.
            processes.agree(digests)
        streams = {
            name: train_batches(task_config, self.scorers[name], self.splits[name]["train"])
            for name, task_config in self.configs.items()
        }
        # Windows and copies of an example count, as they do in a run of one task.
        sizes = [len(self.splits[name]["train"].rows) for name in streams]
        rows = [task_config.data.batch for task_config in self.configs.values()]
        self.batches = TaskBatches(
            streams, sizes, rows, temperature=config.shared.temperature, seed=config.seed
        )
        steps = self.batches.steps_per_epoch
        self.milestones = make_plan(config.train, steps, self.batches.mean_batch)

    def _check_prompts(self) -> None:
        """Raises InputError for a method that is another on another task."""
        prompts = {name: scorer.model.prompt for name, scorer in self.scorers.items()}
        first = next(iter(prompts))
        for name, prompt in prompts.items():
            if prompt != prompts[first]:
                raise InputError(
                    f"prompt.name={self.config.prompt.name} depends on the task, so that {first} "
                    f"and {name} cannot share it; take prefix, soft or another"
                )
        if prompts[first].objectives():
            raise InputError(
                f"prompt.name={self.config.prompt.name} has an objective of its own, which tasks "
                "cannot share; of dart set prompt.fluency=0, or take another method"
            )

    def joined(self) -> Scorer:
        """Makes the scorer of the first task with the heads of all, by the names of the tasks."""
        first = next(iter(self.scorers.values()))
        heads = {name: scorer.model.heads["main"] for name, scorer in self.scorers.items()}
        return first._replace(model=dataclasses.replace(first.model, heads=heads))

    def count_tokens(
        self, count_corpus: Callable[[Scorer], np.ndarray | None]
    ) -> np.ndarray | None:
        """Counts the tokens that a prompt may start from, over all tasks; None = not asked."""
        counts = [
            initial_params.count_tokens(
                self.config, self.splits[name]["train"], functools.partial(count_corpus, scorer)
            )
            for name, scorer in self.scorers.items()
        ]
        return _sum_counts(counts)

    def build(self) -> None:
        """Draws the prompt and the heads."""
        config, scorer = self.config, self.joined()
        counts = self.count_tokens(
            lambda task_config: initial_params.count_corpus(config, task_config, self.workdir)
        )
        weights = self.weights = start(config, scorer, self.loaded, counts, self.placement)
        self.scores = {
            name: build_measure(task_config, self.scorers[name], self.placement)
            for name, task_config in self.configs.items()
        }
        self.set_state(self.placement, weights.trainable, weights.frozen)
        # What trains was copied: the backbone as it was read need not stay in memory.
        self.loaded = self.loaded._replace(params={})
        steps = {name: self._step_of(scorer.model, name) for name in self.scorers}
        self.step = make_shared_step(steps)

    def _step_of(self, model: Model, name: str) -> TrainStep:
        """Makes the train step of a task."""
        task_config = self.configs[name]
        terms = build_objectives(task_config, self.scorers[name].model)
        terms = [term._replace(head=name) for term in terms]
        return make_train_step(model, self.tx, terms, accumulate=task_config.optim.accumulate)

    def take(self) -> TaskBatch:
        """Gives the next batch."""
        return next(self.batches)

    def measure(self, trainable: Flat) -> dict[str, float]:
        """Scores dev of every task, with the mean of their own metrics."""
        return self._score("dev", trainable, self.scores)

    def _score(
        self, split: str, trainable: Flat, scores: Mapping[str, Callable[..., dict[str, float]]]
    ) -> dict[str, float]:
        values: dict[str, float] = {}
        task_metrics: list[float] = []
        for name, score in scores.items():
            if split not in self.splits[name]:
                continue
            numbers = [_of_task(flat, name) for flat in (trainable, self.frozen)]
            measured = score(self.splits[name][split], *numbers)
            task_metrics.append(measured[self.scorers[name].task.metric])
            values |= {f"{name}/{metric}": value for metric, value in measured.items()}
        # Each task counts alike, however many examples it has. Of some alone there is no mean.
        if len(task_metrics) < len(scores):
            return values
        return {"mean": sum(task_metrics) / len(task_metrics), **values}

    def value(self, dev: dict[str, float]) -> float:
        """Picks the mean of the tasks."""
        return dev["mean"]

    def tell(self, log: RunLog, where: str) -> None:
        """Says what was read of each task, and what trains."""
        config, (trainable, frozen, report) = self.config, self.weights
        log.say(f"backbone {config.backbone.path} ({self.backbone.family}), weights "
                f"{report.fingerprint[:12]}")  # fmt: skip
        for line in tell_init(config, next(iter(self.scorers.values())).model.backbone.dims):
            log.say(line)
        for name, scorer in self.scorers.items():
            sizes = ", ".join(f"{part} {split.size}" for part, split in self.splits[name].items())
            share = self.batches.shares[name]
            log.say(f"task {name}, template {scorer.template!r}, {share:.1%} of the steps")
            log.say(f"  {sizes}")
            for line in tell_examples(scorer, self.splits[name], self.notes[name]):
                log.say(f"  {line}")
        log.say(tree.overview(trainable, frozen))
        log.say(f"{self.milestones.total} steps, {where}")

    def finish(self, ended: Ended) -> RunResult:
        """Scores test once, and exports the prompt with the head of each task."""
        config, progress, best = self.config, ended.progress, ended.best
        test: dict[str, float] = {}
        fitted, scores = {}, {}
        for name, scorer in self.scorers.items():
            fitted[name] = scorer.fitted(_own(best.dev, name))
            task_config = self.configs[name]
            # Another threshold, say, is another program; the one that is compiled serves otherwise.
            same = fitted[name].head == scorer.head
            scores[name] = self.scores[name] if same else build_measure(
                task_config, fitted[name], self.placement
            )  # fmt: skip
        if config.train.test:
            test = self._score("test", ended.numbers, scores)
        trained = tree.count(self.weights.trainable)
        if processes.is_first():
            self._export(ended.numbers, fitted, best.dev, test)
        return RunResult(
            method=config.prompt.name, seed=config.seed, tasks=tuple(self.scorers),
            trained=trained, total=trained + tree.count(self.frozen), steps=progress.steps,
            skipped=progress.skipped, best_step=best.step, dev=best.dev, test=test or None,
            time=ended.time,
        )  # fmt: skip

    def _export(
        self, numbers: Flat, scorers: Mapping[str, Scorer], dev: Mapping[str, float],
        test: Mapping[str, float],
    ) -> None:  # fmt: skip
        init = self.record.init
        for name, scorer in scorers.items():
            task_config = self.configs[name]
            measured = {"dev": _own(dev, name), "test": _own(test, name)}
            tensors, metadata = pack(
                scorer, _of_task(numbers, name), _of_task(self.frozen, name),
                backbone=dataclasses.replace(task_config.backbone, family=self.backbone.family),
                fingerprint=self.loaded.report.fingerprint, config=task_config,
                metrics={part: values for part, values in measured.items() if values},
            )  # fmt: skip
            metadata = dataclasses.replace(metadata, init=init)
            write_artifact(Path(self.workdir) / "export" / name, tensors, metadata)


def _own_fields(config: RunConfig) -> dict[str, str]:
    """Lists the fields that are a task's own, without the places of its files."""
    return {field: x for field, x in facts_of(config).items() if field.split(".")[0] in _BLOCKS}


def _own(scores: Mapping[str, float], name: str) -> dict[str, float]:
    """Takes the scores of a task, by their plain names."""
    return {key.partition("/")[2]: x for key, x in scores.items() if key.startswith(f"{name}/")}


def _of_task(flat: Flat, name: str) -> Flat:
    """Takes what a task uses of all numbers, its head as the only one."""
    prefix, leaves = f"head/{name}/", {}
    for leaf, value in flat.items():
        if leaf.startswith(prefix):
            leaves[f"head/main/{leaf.removeprefix(prefix)}"] = value
        elif not leaf.startswith("head/"):
            leaves[leaf] = value
    return leaves


def _sum_counts(counts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Adds the counts of token ids of all tasks, each [up to its greatest id]. None = not asked"""
    counted = [ids for ids in counts if ids is not None]
    if len(counted) < len(counts):
        return None
    total = np.zeros(max(map(len, counted)), np.int64)
    for ids in counted:
        total[: len(ids)] += ids
    return total
