"""A run that learns a task from its examples."""

import jax

from jaxprompt import tree
from jaxprompt.build.backbone import NOTHING, Given
from jaxprompt.build.check import check_config
from jaxprompt.build.evaluation import build_measure
from jaxprompt.build.inheritance import tell_init
from jaxprompt.build.initial_params import count_corpus, count_tokens, start
from jaxprompt.build.optimizer import plan_of
from jaxprompt.build.placement import build_placement, tell_kernel
from jaxprompt.build.task import (
    build_objectives,
    make_task_data,
    open_fitting,
    prepare_task,
    share_front,
    tell_examples,
    train_batches,
)
from jaxprompt.config.run import RunConfig
from jaxprompt.parallel import processes
from jaxprompt.runs import record as records
from jaxprompt.runs.running import Work, carry_out
from jaxprompt.training.features import cache as feature_cache
from jaxprompt.training.log import RunLog
from jaxprompt.training.one_run import Ended
from jaxprompt.training.run_record import BackboneRecord, TaskRecord
from jaxprompt.training.run_result import RunResult
from jaxprompt.tree import Flat
from jaxprompt.types import Batch


def run(config: RunConfig, workdir: str, given: Given = NOTHING) -> RunResult | None:
    """Tunes by a config in a workdir. -> the result, see `running.carry_out`"""
    return carry_out(Tuning(config, workdir, given))


class Tuning(Work[TaskRecord]):
    """Trains on the train split, chooses on dev, and scores test once."""

    DONE, RECORD = "trained", TaskRecord

    def __init__(self, config: RunConfig, workdir: str, given: Given):
        super().__init__(config, workdir)
        self.given = given

    def check(self) -> None:
        """Checks the config."""
        check_config(self.config)

    def prepare(self, saved: TaskRecord | None, started: int | None) -> None:
        """Reads and encodes the splits, and reads the backbone."""
        # `check_repeated` compares the records, once this run's own is made.
        del saved, started
        config = self.config
        placement = build_placement(config)
        backbone = open_fitting(config, placement)
        examples, scorer, self.splits = prepare_task(config, placement, backbone, self.given.rows)
        scorer = share_front(config, scorer).with_vocabulary_of(self.splits["train"])
        self.notes = examples.notes
        if jax.process_count() > 1:
            # Every process reads for itself, and takes its share of the same rows.
            rows = {f"the rows of {name}": part.digest() for name, part in self.splits.items()}
            processes.agree(rows)
        self.batches = train_batches(config, scorer, self.splits["train"])
        self.milestones = plan_of(
            config, self.batches.steps_per_epoch, len(self.splits["train"].rows)
        )
        self.backbone, self.loaded = self.given.load(backbone, placement)
        self.scorer, self.placement = scorer.with_backbone(self.backbone), placement
        backbone_record = BackboneRecord(backbone.family, self.loaded.report.fingerprint)
        data = make_task_data(examples, scorer)
        self.record = records.make_record(config, data, backbone_record)

    def build(self) -> None:
        """Draws what is fresh, and plans which states are kept."""
        config, scorer, splits, placement = self.config, self.scorer, self.splits, self.placement
        counts = count_tokens(
            config, splits["train"], lambda: count_corpus(config, scorer, self.workdir)
        )
        weights = start(config, scorer, self.loaded, counts, placement)
        self.weights = weights
        self.kept, self.fill = feature_cache.plan_keeping(
            config, scorer, splits, weights, placement, self.workdir
        )
        self.score = build_measure(config, scorer, placement, self.kept)
        objectives = build_objectives(config, scorer.model)
        self.set_training(placement, self.kept.model, objectives, weights.trainable, weights.frozen)
        # What trains was copied: the backbone as it was read need not stay in memory.
        self.loaded = self.loaded._replace(params={})

    def take(self) -> Batch:
        """Gives the next batch, with the states of its rows where they are kept."""
        return self.kept.give(self.splits["train"], next(self.batches))

    def measure(self, trainable: Flat) -> dict[str, float]:
        """Scores dev."""
        return self.score(self.splits["dev"], trainable, self.frozen)

    def value(self, dev: dict[str, float]) -> float:
        """Picks the task's own metric."""
        return dev[self.scorer.task.metric]

    def tell(self, log: RunLog, where: str) -> None:
        """Says what was read, what trains, and what is fresh; then computes what is kept."""
        config, scorer, (trainable, frozen, report) = self.config, self.scorer, self.weights
        family = self.backbone.family
        log.say(f"backbone {config.backbone.path} ({family}), weights {report.fingerprint[:12]}")
        log.say(f"  heads in the checkpoint: {', '.join(report.heads) or 'none'}")
        if report.unused:
            log.say(f"  unused: {len(report.unused)} tensors, {', '.join(report.unused[:5])}")
        if report.requantized:
            given = config.backbone.quantize
            log.say(f"  {report.requantized} matrices have other codes in the file than {given}'s")
        for line in tell_init(config, scorer.model.backbone.dims):
            log.say(line)
        log.say(f"task {scorer.task.name}, template {scorer.template!r}")
        sizes = (f"{name} {part.size}" for name, part in self.splits.items())
        log.say("  " + ", ".join(sizes))
        for line in tell_examples(scorer, self.splits, self.notes):
            log.say(f"  {line}")
        log.say(tree.overview(trainable, frozen))
        fresh = sorted({"/".join(n.split("/")[:3]) for n in trainable if n.startswith("head/")})
        if fresh and config.train.init_head:
            log.say(f"head from {config.prompt.get('init')}: {', '.join(fresh)}")
        elif fresh:
            log.say(f"fresh, not in the checkpoint: {', '.join(fresh)}")
        log.say(f"{self.milestones.total} steps, {where}")
        for line in tell_kernel(config, self.placement, self.backbone):
            log.say(line)
        self.fill(log.say)

    def finish(self, ended: Ended) -> RunResult:
        """Scores test once, with the best numbers."""
        config, trained = self.config, tree.count(self.weights.trainable)
        progress, best = ended.progress, ended.best
        has_test = config.train.test and "test" in self.splits
        fitted, score = self.scorer.fitted(best.dev), self.score
        # A head may choose something on dev, as a threshold: then it is another program.
        if fitted.head != self.scorer.head:
            score = build_measure(config, fitted, self.placement, self.kept)
        test = score(self.splits["test"], ended.numbers, self.frozen) if has_test else None
        return RunResult(
            method=config.prompt.name, seed=config.seed, trained=trained,
            total=trained + tree.count(self.frozen), steps=progress.steps,
            skipped=progress.skipped, best_step=best.step, dev=best.dev, test=test, time=ended.time,
        )  # fmt: skip
