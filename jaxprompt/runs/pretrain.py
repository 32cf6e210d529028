"""A run that pre-trains a prompt: on a corpus (Gu et al. 2022, "PPT"), or on texts with topics."""

from typing import Any

from jaxprompt import tree
from jaxprompt.build.check import check_config
from jaxprompt.build.initial_params import count_tokens
from jaxprompt.build.method import head_of
from jaxprompt.build.optimizer import plan_of
from jaxprompt.build.placement import build_placement, tell_kernel
from jaxprompt.corpus.denoise.batches import Visits
from jaxprompt.runs import denoising, ppt
from jaxprompt.runs import record as records
from jaxprompt.runs import train as tune
from jaxprompt.runs.running import CorpusWork, carry_out
from jaxprompt.training.log import RunLog
from jaxprompt.training.loop import Ended
from jaxprompt.training.throughput import Meter


def run(c: Any, workdir: str) -> dict[str, Any] | None:
    """Pre-trains by a config in a workdir. -> the result, see `running.carry_out`"""
    return tune.run(c, workdir) if has_topics(c) else carry_out(Pretraining(c, workdir))


def has_topics(c: Any) -> bool:
    """Tells whether a config learns from texts with topics, as a task is learned."""
    return not c.ppt.task and head_of(c).PRETRAINS


class Pretraining(CorpusWork):
    """Trains on documents of a corpus, and chooses by others that are held out."""

    DONE = "pre-trained"

    def check(self) -> None:
        """Checks the config, and reads the annotations where it has some."""
        check_config(self.config)
        ppt.check_ppt(self.config)

    def prepare(self, saved: dict[str, Any] | None, started: int | None) -> None:
        """Indexes the corpus where it is not, and reads the backbone."""
        c, placement = self.config, build_placement(self.config)
        asked = ppt.open_asked(c, placement)
        corpus = self.read_corpus(asked.scorer.tokenizer, asked.backbone.module.cfg.vocab, started)
        share = placement.share()
        self.text = ppt.read_text(c, corpus, asked, share)
        ppt.check_same(saved, self.text.facts, c)
        self.batches = Visits(self.text.rows, batch=c.data.batch, seed=c.seed, share=share)
        self.milestones = plan_of(c, self.batches.steps_per_epoch, len(self.text.rows))
        counts = count_tokens(c, None, corpus.token_counts)
        self.asked, self.learned = ppt.load(c, asked, placement, counts)
        self.corpus, self.placement = corpus, placement
        self.record = records.make_record(
            c, self.text.facts, asked.scorer.template, asked.backbone.family,
            self.learned.report.fingerprint,
        )  # fmt: skip

    def build(self) -> None:
        """Makes the step, and counts what it asks for."""
        c, learned, (task, held) = self.config, self.learned, self.text.tasks
        place = self.placement
        self.score_held = denoising.build_scores(
            place, learned, self.text.held, c.seed, ppt.scoring(held)
        )
        self.set_training(
            place, learned.model, learned.objectives, learned.trainable, learned.frozen
        )
        like = next(iter(self.text.held))
        flops = ppt.flops_of(learned, self.tx, self.state, like, c.data.batch, place)
        self.meter = Meter(self.batches, ppt.scoring(task), flops, c.backbone.dtype, place)
        # None is the dropout of config.json, and so counts as some.
        self.drops = c.backbone.dropout != 0 or c.prompt.get("dropout", 0) != 0

    def tell(self, log: RunLog, where: str) -> None:
        """Says what was read, what was left out of it, and what trains."""
        c, learned = self.config, self.learned
        for line in ppt.told(c, self.asked.backbone, learned.report, self.corpus):
            log.say(line)
        for line in ppt.told_task(self.asked, self.text):
            log.say(line)
        log.say(tree.overview(learned.trainable, learned.frozen))
        size = f"{c.data.batch} x {c.data.max_len} tokens"
        log.say(f"{self.milestones.total} steps of {size}, {where}")
        for line in tell_kernel(c, self.placement, self.asked.backbone.module):
            log.say(line)

    def finish(self, ended: Ended) -> dict[str, Any]:
        """Makes the result; `export` writes the prompt."""
        c, trained = self.config, tree.count(self.learned.trainable)
        return ended.progress.result(
            {"task": c.ppt.task, "method": c.prompt.name, "seed": c.seed},
            trained=trained, total=trained + tree.count(self.frozen), scored="held_out",
            time=ended.time,
        )  # fmt: skip
