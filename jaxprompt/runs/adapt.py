"""A run that goes on with a backbone's own pre-training on a corpus."""

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from jaxprompt import tree
from jaxprompt.build.check import check_config
from jaxprompt.build.optimizer import plan_of
from jaxprompt.build.placement import build_placement, tell_kernel
from jaxprompt.config.run import ReplacedTokens, RunConfig
from jaxprompt.convert.save import save_backbone
from jaxprompt.corpus import check_unchanged
from jaxprompt.corpus.denoise.batches import Pass, Visits
from jaxprompt.data.text.identity import identify
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.files import write_atomic
from jaxprompt.parallel import processes
from jaxprompt.parallel.compilation import keep_programs
from jaxprompt.runs import denoising
from jaxprompt.runs.replaced_tokens import tie
from jaxprompt.runs.running import CorpusWork, agree_on, carry_out, facts
from jaxprompt.training import run_folder
from jaxprompt.training.log import RunLog
from jaxprompt.training.one_run import Ended
from jaxprompt.training.run_record import AdaptationRecord, BackboneRecord
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.throughput import Meter
from jaxprompt.tree import Flat


def run(config: RunConfig, workdir: str) -> RunResult | None:
    """Adapts by a config in a workdir. -> the result, see `running.carry_out`"""
    return carry_out(Adapting(config, workdir))


def score(config: RunConfig, workdir: str) -> dict[str, object]:
    """Scores held-out text with the weights as they are; nothing is bound to the workdir."""
    work = Adapting(config, workdir)
    work.check()
    keep_programs(config.train.compilation_cache)
    with run_folder.lock(workdir):
        processes.agree(facts(config))
        work.prepare(None, None)
        agree_on(work.record)
        # Nothing trains here: the threads that make batches ahead are ended.
        work.batches.close()
        return {"held_out": work.scores()(work.adapted.trainable), "rows": work.dev.size}


class Adapting(CorpusWork[AdaptationRecord]):
    """Trains on documents of a corpus, chooses by others that are held out, writes a backbone."""

    DONE, RECORD = "adapted", AdaptationRecord

    def check(self) -> None:
        """Checks the config."""
        check_config(self.config)
        denoising.check_objective(self.config)

    def prepare(self, saved: AdaptationRecord | None, started: int | None) -> None:
        """Indexes the corpus where it is not, and reads or draws the backbone."""
        config, placement = self.config, build_placement(self.config)
        backbone = denoising.open_adaptable(config, placement)
        self.tokenizer = load_tokenizer(backbone.folder)
        denoiser = denoising.make_denoiser(config, self.tokenizer, backbone)
        corpus = self.read_corpus(self.tokenizer, backbone.module.cfg.vocab, started)
        if saved is not None:
            # Before rows are planned: with other text the saved position would mean other rows.
            check_unchanged(saved.corpus, corpus.fingerprint)
        self.rows, self.held = denoising.read_rows(config, corpus, denoiser, self.tokenizer)
        share = placement.share()
        self.batches = Visits(self.rows, batch=config.data.batch, seed=config.seed, share=share)
        self.dev = Pass(
            self.held,
            batch=config.data.eval_batch,
            seed=config.data.seed,
            limit=config.corpus.dev_rows,
            share=share,
        )
        self.milestones = plan_of(config, self.batches.steps_per_epoch, len(self.rows))
        self.adapted = denoising.load_adaptable(config, backbone, placement)
        self.corpus, self.placement, self.folder = corpus, placement, backbone.folder
        self.record = AdaptationRecord(
            corpus=corpus.fingerprint,
            store=corpus.checksums,
            backbone=BackboneRecord(self.adapted.backbone.family, self.adapted.fingerprint),
            identity=identify(self.tokenizer, backbone.module.cfg),
        )

    def scores(self) -> Callable[[Flat], dict[str, float]]:
        """Makes trainable -> the scores of held-out rows."""
        return denoising.build_scores(self.placement, self.adapted, self.dev, self.config.seed)

    def build(self) -> None:
        """Makes the step, and counts what it asks for."""
        config, place, adapted = self.config, self.placement, self.adapted
        self.score_held = self.scores()
        self.set_training(
            place, adapted.model, adapted.objectives, adapted.trainable, adapted.frozen
        )
        flops = denoising.flops_of(adapted, next(iter(self.dev)), config.data.batch, place)
        self.meter = Meter(self.batches, denoising.score_sums, flops, config.backbone.dtype, place)
        self.drops = config.backbone.dropout != 0

    def tell(self, log: RunLog, where: str) -> None:
        """Says what was read, what trains, and what is fresh."""
        config, corpus, adapted = self.config, self.corpus, self.adapted
        source, own = config.backbone.init or config.backbone.path, adapted.report
        log.say(f"backbone {source} ({adapted.backbone.family}), {own.fingerprint[:12]}")
        if own.fresh:
            log.say(f"fresh, not in the checkpoint: {', '.join(own.fresh)}")
        if adapted.generator is not None and isinstance(config.objective, ReplacedTokens):
            generator = config.objective.generator_path or "drawn"
            log.say(f"generator {generator} ({adapted.generator.family})")
        log.say(
            f"corpus {config.corpus.path}: {len(corpus):,} documents, {corpus.num_tokens:,} "
            f"tokens; {len(self.rows):,} rows of {config.data.max_len}, {self.dev.size} held-out "
            "rows"
        )
        for line in corpus.notes():
            log.say(line)
        log.say(tree.overview(adapted.trainable, adapted.frozen))
        log.say(f"{config.objective.name}: {self.milestones.total} steps, {where}")
        for line in tell_kernel(config, self.placement, adapted.backbone):
            log.say(line)

    def finish(self, ended: Ended) -> RunResult:
        """Writes a folder that transformers loads."""
        config, corpus, adapted = self.config, self.corpus, self.adapted
        trained = tree.count(adapted.trainable)
        progress, best = ended.progress, ended.best
        result = RunResult(
            objective=config.objective.name, seed=config.seed, trained=trained,
            total=trained + tree.count(adapted.frozen), steps=progress.steps,
            skipped=progress.skipped, best_step=best.step, held_out=best.dev,
            time=ended.time,
        )  # fmt: skip
        params = tree.merge(ended.numbers, adapted.frozen)
        card = result.to_json() | {
            "corpus": f"{config.corpus.path}, {len(corpus):,} documents, {corpus.num_tokens:,} "
            "tokens",
            "start": config.backbone.init
            or f"{config.backbone.path} ({adapted.report.fingerprint[:12]})",
        }
        # Named by what it learned from: a workdir may be moved, or be called otherwise.
        text = json.dumps(self.record.to_json(), sort_keys=True)
        run = f"adapt {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        save = functools.partial(
            save_backbone, tokenizer=self.folder, card=card, run=run,
            rescale=config.backbone.rescale,
        )  # fmt: skip
        own, folder = adapted.backbone, Path(self.workdir)
        save(folder / "backbone", own.family, own.hf, params["backbone"])
        if adapted.generator is not None:
            # The embeddings that it shares are the discriminator's, and its file needs them too.
            own, both = adapted.generator, tie(params["generator"], params["backbone"])
            save(folder / "generator", own.family, own.hf, both)
        if denoising.objective_of(config).examples:
            # All processes fill, for the step runs on all devices; the first writes.
            text = denoising.fill(
                config, self.placement, adapted, ended.numbers, self.held, self.tokenizer
            )
            if processes.is_first():
                write_atomic(folder / "examples.txt", text)
        return result
