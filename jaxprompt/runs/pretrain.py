"""A run that pre-trains a prompt: on a corpus (Gu et al. 2022, "PPT"), or on texts with topics."""

from jaxprompt import tree
from jaxprompt.build.check import check_config
from jaxprompt.build.initial_params import count_tokens
from jaxprompt.build.method import head_of
from jaxprompt.build.optimizer import plan_of
from jaxprompt.build.placement import build_placement, tell_kernel
from jaxprompt.config.run import RunConfig
from jaxprompt.corpus.denoise.batches import Visits
from jaxprompt.runs import denoising, ppt
from jaxprompt.runs import record as records
from jaxprompt.runs import train as tune
from jaxprompt.runs.running import CorpusWork, carry_out
from jaxprompt.training.log import RunLog
from jaxprompt.training.one_run import Ended
from jaxprompt.training.run_record import BackboneRecord, PretrainingRecord
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.throughput import Meter


def run(config: RunConfig, workdir: str) -> RunResult | None:
    """Pre-trains by a config in a workdir. -> the result, see `running.carry_out`"""
    return (
        tune.run(config, workdir) if has_topics(config) else carry_out(Pretraining(config, workdir))
    )


def has_topics(config: RunConfig) -> bool:
    """Tells whether a config learns from texts with topics, as a task is learned."""
    return not config.ppt.task and head_of(config).PRETRAINS


class Pretraining(CorpusWork[PretrainingRecord]):
    """Trains on documents of a corpus, and chooses by others that are held out."""

    DONE, RECORD = "pre-trained", PretrainingRecord

    def check(self) -> None:
        """Checks the config, and reads the annotations where it has some."""
        check_config(self.config)
        ppt.check_ppt(self.config)

    def prepare(self, saved: PretrainingRecord | None, started: int | None) -> None:
        """Indexes the corpus where it is not, and reads the backbone."""
        config, placement = self.config, build_placement(self.config)
        ppt_task = ppt.open_task(config, placement)
        corpus = self.read_corpus(
            ppt_task.scorer.tokenizer, ppt_task.backbone.module.cfg.vocab, started
        )
        share = placement.share()
        self.text = ppt.read_text(config, corpus, ppt_task, share)
        ppt.check_same(saved, self.text.data, config)
        self.batches = Visits(
            self.text.rows, batch=config.data.batch, seed=config.seed, share=share
        )
        self.milestones = plan_of(config, self.batches.steps_per_epoch, len(self.text.rows))
        counts = count_tokens(config, None, corpus.token_counts)
        self.ppt_task, self.learned = ppt.load(config, ppt_task, placement, counts)
        self.corpus, self.placement = corpus, placement
        backbone = BackboneRecord(ppt_task.backbone.family, self.learned.report.fingerprint)
        self.record = records.make_pretraining_record(config, self.text.data, backbone)

    def build(self) -> None:
        """Makes the step, and counts what it asks for."""
        config, learned, (task, held) = self.config, self.learned, self.text.tasks
        place = self.placement
        self.score_held = denoising.build_scores(
            place, learned, self.text.held, config.seed, ppt.scoring(held)
        )
        self.set_training(
            place, learned.model, learned.objectives, learned.trainable, learned.frozen
        )
        like = next(iter(self.text.held))
        flops = ppt.flops_of(learned, self.tx, self.state, like, config.data.batch, place)
        self.meter = Meter(self.batches, ppt.scoring(task), flops, config.backbone.dtype, place)
        # None is the dropout of config.json, and so counts as some.
        self.drops = config.backbone.dropout != 0 or config.prompt.get("dropout", 0) != 0

    def tell(self, log: RunLog, where: str) -> None:
        """Says what was read, what was left out of it, and what trains."""
        config, learned = self.config, self.learned
        for line in ppt.tell_corpus(config, self.ppt_task.backbone, learned.report, self.corpus):
            log.say(line)
        for line in ppt.tell_task(self.ppt_task, self.text):
            log.say(line)
        log.say(tree.overview(learned.trainable, learned.frozen))
        size = f"{config.data.batch} x {config.data.max_len} tokens"
        log.say(f"{self.milestones.total} steps of {size}, {where}")
        for line in tell_kernel(config, self.placement, self.ppt_task.backbone):
            log.say(line)

    def finish(self, ended: Ended) -> RunResult:
        """Makes the result; `export` writes the prompt."""
        config, trained = self.config, tree.count(self.learned.trainable)
        progress, best = ended.progress, ended.best
        return RunResult(
            task=config.ppt.task, method=config.prompt.name, seed=config.seed, trained=trained,
            total=trained + tree.count(self.frozen), steps=progress.steps,
            skipped=progress.skipped, best_step=best.step, held_out=best.dev, time=ended.time,
        )  # fmt: skip
