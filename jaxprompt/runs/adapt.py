"""A run that continues the pre-training of a backbone on a corpus."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxprompt import tree
from jaxprompt.build.check import check_config
from jaxprompt.build.optimizer import config_milestones
from jaxprompt.build.placement import build_placement, kernel_notes
from jaxprompt.config.run import ReplacedTokens, RunConfig
from jaxprompt.convert.save import save_backbone
from jaxprompt.corpus import Corpus, check_unchanged
from jaxprompt.corpus.denoise.batches import DenoisingSamples, EvalBatches
from jaxprompt.data.text.identity import fingerprints
from jaxprompt.data.text.tokenizer import Tokenizer, load_tokenizer
from jaxprompt.files import write_atomic
from jaxprompt.parallel import processes
from jaxprompt.parallel.compilation import enable_compilation_cache
from jaxprompt.runs import denoising
from jaxprompt.runs.replaced_tokens import tie_embeddings
from jaxprompt.runs.running import (
    RunStages,
    agree_on,
    agreed_settings,
    init_train_state,
    make_result,
    open_corpus,
    run_stages,
)
from jaxprompt.training import run_folder
from jaxprompt.training.one_run import Job, Prepared, TrainOutcome
from jaxprompt.training.run_record import AdaptationRecord, BackboneRecord
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.steps import make_train_step
from jaxprompt.tree import Flat


def adapt_backbone(config: RunConfig, workdir: str) -> RunResult | None:
    """Runs `adapt` in a workdir. Returns the result, see `running.run_stages`."""
    return run_stages(AdaptStages(config, workdir))


def score_held_out(config: RunConfig, workdir: str) -> dict[str, object]:
    """Evaluates held-out text with the initial weights; writes no config to the workdir."""
    work = AdaptStages(config, workdir)
    work.check()
    enable_compilation_cache(config.train.compilation_cache)
    with run_folder.lock_workdir(workdir):
        processes.check_agreement(agreed_settings(config))
        prepared = work.prepare(None, None)
        agree_on(prepared.record)
        scores = work.build_scores(prepared)(prepared.adapted.trainable)
        return {"held_out": scores, "rows": prepared.dev.size}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PreparedBackbone(Prepared[AdaptationRecord]):
    """Sequences of a corpus, and the backbone that trains on them."""

    tokenizer: Tokenizer
    folder: Path  # of the backbone
    corpus: Corpus
    rows: DenoisingSamples  # for training
    held_out: DenoisingSamples
    dev: EvalBatches  # over the held-out rows
    adapted: denoising.AdaptableModel


class AdaptStages(RunStages[AdaptationRecord, PreparedBackbone, Job]):
    """Trains on documents of a corpus, evaluates on held-out ones, and writes a backbone."""

    DONE, RECORD = "adapted", AdaptationRecord

    def check(self) -> None:
        """Checks the config."""
        check_config(self.config)
        denoising.check_objective(self.config)

    def prepare(self, saved: AdaptationRecord | None, resume_step: int | None) -> PreparedBackbone:
        """Indexes the corpus if needed, and loads or randomly initialises the backbone."""
        config, placement = self.config, build_placement(self.config)
        backbone = denoising.open_adaptable(config, placement)
        tokenizer = load_tokenizer(backbone.folder)
        denoiser = denoising.make_denoiser(config, tokenizer, backbone)
        vocab = backbone.module.cfg.vocab
        corpus = open_corpus(config, tokenizer, vocab, self.workdir, resume_step)
        if saved is not None:
            # Before batches are planned: in other text the saved position means other sequences.
            check_unchanged(saved.corpus, corpus.fingerprint)
        rows, held_out = denoising.make_denoising_rows(config, corpus, denoiser, tokenizer)
        dev = EvalBatches(
            held_out,
            batch=config.data.eval_batch,
            seed=config.data.seed,
            limit=config.corpus.dev_rows,
            share=placement.batch_part(),
        )
        steps_per_epoch = -(-len(rows) // config.data.batch)
        milestones = config_milestones(config, steps_per_epoch, len(rows))
        adapted = denoising.load_adaptable(config, backbone, placement)
        record = AdaptationRecord(
            corpus=corpus.fingerprint,
            store=corpus.checksums,
            backbone=BackboneRecord(adapted.backbone.family, adapted.fingerprint),
            identity=fingerprints(tokenizer, backbone.module.cfg),
        )
        return PreparedBackbone(
            placement=placement,
            steps_per_epoch=steps_per_epoch,
            milestones=milestones,
            settings=config.train,
            record=record,
            tokenizer=tokenizer,
            folder=backbone.folder,
            corpus=corpus,
            rows=rows,
            held_out=held_out,
            dev=dev,
            adapted=adapted,
        )

    def build_scores(self, prepared: PreparedBackbone) -> Callable[[Flat], dict[str, float]]:
        """Returns a function (trainable) -> scores of held-out sequences."""
        placement, seed = prepared.placement, self.config.seed
        return denoising.make_held_out_scorer(placement, prepared.adapted, prepared.dev, seed)

    def build(self, prepared: PreparedBackbone) -> Job:
        """Makes the step, and counts its FLOPs."""
        config, placement, adapted = self.config, prepared.placement, prepared.adapted
        tx, state = init_train_state(config, prepared, adapted.trainable)
        flops = denoising.count_adapt_flops(
            adapted, next(iter(prepared.dev)), config.data.batch, placement
        )
        accumulate = config.optim.accumulate
        return Job(
            step=make_train_step(adapted.model, tx, adapted.objectives, accumulate=accumulate),
            state=state,
            frozen=adapted.frozen,
            feed=functools.partial(
                denoising.feed_rows, config, prepared.rows, placement, denoising.score_sums, flops
            ),
            measure=self.build_scores(prepared),
            value=denoising.held_out_value,
            has_dropout=config.backbone.dropout != 0,
        )

    def lines(self, prepared: PreparedBackbone, job: Job, start_message: str) -> Iterator[str]:
        """Yields log lines: what was read, what trains, and what is randomly initialised."""
        config, corpus, adapted = self.config, prepared.corpus, prepared.adapted
        source, report = config.backbone.init or config.backbone.path, adapted.report
        yield f"backbone {source} ({adapted.backbone.family}), {report.fingerprint[:12]}"
        if report.absent:
            yield f"randomly initialised: {', '.join(report.absent)}"
        if adapted.generator is not None and isinstance(config.objective, ReplacedTokens):
            generator = config.objective.generator_path or "randomly initialised"
            yield f"generator {generator} ({adapted.generator.family})"
        yield (
            f"corpus {config.corpus.path}: {len(corpus):,} documents, {corpus.num_tokens:,} "
            f"tokens; {len(prepared.rows):,} sequences of {config.data.max_len} tokens, "
            f"{prepared.dev.size} held-out sequences"
        )
        yield from corpus.notes()
        yield tree.parameter_table(adapted.trainable, adapted.frozen)
        yield f"{config.objective.name}: {prepared.milestones.total} steps, {start_message}"
        yield from kernel_notes(config, prepared.placement, adapted.backbone)

    def finish(self, prepared: PreparedBackbone, job: Job, outcome: TrainOutcome) -> RunResult:
        """Writes the backbone as a folder that transformers loads."""
        config, corpus, adapted = self.config, prepared.corpus, prepared.adapted
        objective, scores = config.objective.name, outcome.best.dev
        result = make_result(config, job, outcome, objective=objective, held_out=scores)
        params = tree.merge(outcome.trainable, adapted.frozen)
        model_card = result.to_json() | {
            "corpus": f"{config.corpus.path}, {len(corpus):,} documents, {corpus.num_tokens:,} "
            "tokens",
            "start": config.backbone.init
            or f"{config.backbone.path} ({adapted.report.fingerprint[:12]})",
        }
        # Named by its data: a workdir may be moved or renamed.
        record_json = json.dumps(prepared.record.to_json(), sort_keys=True)
        save = functools.partial(
            save_backbone,
            tokenizer=prepared.folder,
            card=model_card,
            run=f"adapt {hashlib.sha256(record_json.encode()).hexdigest()[:16]}",
            rescale=config.backbone.rescale,
        )
        folder, backbone = Path(self.workdir), adapted.backbone
        save(folder / "backbone", backbone.family, backbone.hf, params["backbone"])
        if adapted.generator is not None:
            # It shares the discriminator's embeddings, which its file must contain, too.
            generator, tied = (
                adapted.generator,
                tie_embeddings(params["generator"], params["backbone"]),
            )
            save(folder / "generator", generator.family, generator.hf, tied)
        if denoising.objective_of(config).examples:
            # All processes predict, because the step runs on all devices; the first writes.
            text = denoising.render_predictions(
                config,
                prepared.placement,
                adapted,
                outcome.trainable,
                prepared.held_out,
                prepared.tokenizer,
            )
            if processes.is_first():
                write_atomic(folder / "examples.txt", text)
        return result
