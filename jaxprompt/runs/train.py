"""A run that learns a task from its examples."""

from typing import Any

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
    describe_data,
    open_fitting,
    prepare_task,
    share_front,
    tell_examples,
    train_batches,
)
from jaxprompt.parallel import processes
from jaxprompt.runs import record as records
from jaxprompt.runs.running import Work, carry_out
from jaxprompt.training.features import cache as feature_cache
from jaxprompt.training.log import RunLog
from jaxprompt.training.loop import Ended
from jaxprompt.tree import Flat
from jaxprompt.types import Batch


def run(c: Any, workdir: str, given: Given = NOTHING) -> dict[str, Any] | None:
    """Tunes by a config in a workdir. -> the result, see `running.carry_out`"""
    return carry_out(Tuning(c, workdir, given))


class Tuning(Work):
    """Trains on the train split, chooses on dev, and scores test once."""

    DONE = "trained"

    def __init__(self, c: Any, workdir: str, given: Given):
        super().__init__(c, workdir)
        self.given = given

    def check(self) -> None:
        """Checks the config."""
        check_config(self.config)

    def prepare(self, saved: dict[str, Any] | None, started: int | None) -> None:
        """Reads and encodes the splits, and reads the backbone."""
        # `check_repeated` compares the records, once this run's own is made.
        del saved, started
        c = self.config
        placement = build_placement(c)
        backbone = open_fitting(c, placement)
        examples, scorer, self.splits = prepare_task(c, placement, backbone, self.given.rows)
        scorer = share_front(c, scorer).with_vocabulary_of(self.splits["train"])
        self.notes = examples.notes
        if jax.process_count() > 1:
            # Every process reads for itself, and takes its share of the same rows.
            rows = {f"the rows of {name}": part.digest() for name, part in self.splits.items()}
            processes.agree(rows)
        self.batches = train_batches(c, scorer, self.splits["train"])
        self.milestones = plan_of(c, self.batches.steps_per_epoch, len(self.splits["train"].rows))
        self.backbone, self.loaded = self.given.load(backbone, placement)
        self.scorer, self.placement = scorer.with_backbone(self.backbone), placement
        self.record = records.make_record(
            c, describe_data(examples, scorer), scorer.template, backbone.family,
            self.loaded.report.fingerprint,
        )  # fmt: skip

    def build(self) -> None:
        """Draws what is fresh, and plans which states are kept."""
        c, scorer, splits, placement = self.config, self.scorer, self.splits, self.placement
        counts = count_tokens(c, splits["train"], lambda: count_corpus(c, scorer, self.workdir))
        weights = start(c, scorer, self.loaded, counts, placement)
        self.weights = weights
        self.kept, self.fill = feature_cache.plan_keeping(
            c, scorer, splits, weights, placement, self.workdir
        )
        self.score = build_measure(c, scorer, placement, self.kept)
        objectives = build_objectives(c, scorer.model)
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
        c, scorer, (trainable, frozen, report) = self.config, self.scorer, self.weights
        family = self.backbone.family
        log.say(f"backbone {c.backbone.path} ({family}), weights {report.fingerprint[:12]}")
        log.say(f"  heads in the checkpoint: {', '.join(report.heads) or 'none'}")
        if report.unused:
            log.say(f"  unused: {len(report.unused)} tensors, {', '.join(report.unused[:5])}")
        if report.requantized:
            given = c.backbone.quantize
            log.say(f"  {report.requantized} matrices have other codes in the file than {given}'s")
        for line in tell_init(c, scorer.model.backbone.dims):
            log.say(line)
        log.say(f"task {scorer.task.name}, template {scorer.template!r}")
        sizes = (f"{name} {part.size}" for name, part in self.splits.items())
        log.say("  " + ", ".join(sizes))
        for line in tell_examples(scorer, self.splits, self.notes):
            log.say(f"  {line}")
        log.say(tree.overview(trainable, frozen))
        fresh = sorted({"/".join(n.split("/")[:3]) for n in trainable if n.startswith("head/")})
        if fresh and c.train.init_head:
            log.say(f"head from {c.prompt.init}: {', '.join(fresh)}")
        elif fresh:
            log.say(f"fresh, not in the checkpoint: {', '.join(fresh)}")
        log.say(f"{self.milestones.total} steps, {where}")
        for line in tell_kernel(c, self.placement, self.backbone.module):
            log.say(line)
        self.fill(log.say)

    def finish(self, ended: Ended) -> dict[str, Any]:
        """Scores test once, with the best numbers."""
        c, trained = self.config, tree.count(self.weights.trainable)
        has_test = c.train.test and "test" in self.splits
        fitted, score = self.scorer.fitted(ended.progress.best["dev"]), self.score
        # A head may choose something on dev, as a threshold: then it is another program.
        if fitted.head != self.scorer.head:
            score = build_measure(c, fitted, self.placement, self.kept)
        test = score(self.splits["test"], ended.numbers, self.frozen) if has_test else None
        return ended.progress.result(
            {"method": c.prompt.name, "seed": c.seed},
            trained=trained, total=trained + tree.count(self.frozen), scored="dev", test=test,
            time=ended.time,
        )  # fmt: skip
