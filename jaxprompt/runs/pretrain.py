"""A run that pre-trains a prompt: on a corpus (Gu et al. 2022, "PPT"), or on texts with topics."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np

from jaxprompt import tree
from jaxprompt.build.backbone import load_weights
from jaxprompt.build.check import check_config
from jaxprompt.build.initial_params import count_tokens
from jaxprompt.build.method import get_head
from jaxprompt.build.optimizer import config_milestones
from jaxprompt.build.placement import build_placement, kernel_notes
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.load import Loaded
from jaxprompt.parallel.sharding import Placement
from jaxprompt.runs import denoising, ppt
from jaxprompt.runs import record as records
from jaxprompt.runs import train as tune
from jaxprompt.runs.running import (
    PreparedWithWeights,
    RunStages,
    init_train_state,
    make_result,
    open_corpus,
    run_stages,
)
from jaxprompt.training.one_run import Job, TrainOutcome
from jaxprompt.training.run_record import BackboneRecord, PretrainingRecord
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.steps import make_train_step


def pretrain_prompt(config: RunConfig, workdir: str) -> RunResult | None:
    """Runs `pretrain` in a workdir. Returns the result, see `running.run_stages`."""
    return (
        tune.train_prompt(config, workdir)
        if has_topics(config)
        else run_stages(PretrainStages(config, workdir))
    )


def has_topics(config: RunConfig) -> bool:
    """Returns whether a config trains on texts with topics, like on a task."""
    return not config.ppt.task and get_head(config).PRETRAINS


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PreparedPrompt(PreparedWithWeights[PretrainingRecord]):
    """A pre-training task on a corpus, and the backbone."""

    ppt_task: ppt.PptTask
    text: ppt.CorpusExamples
    counts: np.ndarray | None  # of tokens of the corpus, where the prompt starts from them


def make_prepared_prompt(
    config: RunConfig,
    placement: Placement,
    ppt_task: ppt.PptTask,
    text: ppt.CorpusExamples,
    loaded: Loaded,
    count_tokens_of_corpus: Callable[[], np.ndarray],
) -> PreparedPrompt:
    """Combines the inputs of a run and its backbone weights, which are in `ppt_task`."""
    steps_per_epoch = -(-len(text.rows) // config.data.batch)
    backbone = BackboneRecord(ppt_task.backbone.family, loaded.report.fingerprint)
    return PreparedPrompt(
        placement=placement,
        steps_per_epoch=steps_per_epoch,
        milestones=config_milestones(config, steps_per_epoch, len(text.rows)),
        settings=config.train,
        record=PretrainingRecord(
            **vars(text.data), backbone=backbone, **records.init_fields(config)
        ),
        ppt_task=ppt_task,
        text=text,
        loaded=loaded,
        counts=count_tokens(config, None, count_tokens_of_corpus),
    )


class PretrainStages(RunStages[PretrainingRecord, PreparedPrompt, Job]):
    """Trains on documents of a corpus, and evaluates on held-out ones."""

    DONE, RECORD = "pre-trained", PretrainingRecord

    def check(self) -> None:
        """Checks the config, and reads the annotations if there are any."""
        check_config(self.config)
        ppt.check_ppt(self.config)

    def prepare(self, saved: PretrainingRecord | None, resume_step: int | None) -> PreparedPrompt:
        """Indexes the corpus if needed, and loads the backbone."""
        config, placement = self.config, build_placement(self.config)
        ppt_task = ppt.open_task(config, placement)
        vocab = ppt_task.backbone.module.cfg.vocab
        corpus = open_corpus(config, ppt_task.scorer.tokenizer, vocab, self.workdir, resume_step)
        text = ppt.make_corpus_examples(config, corpus, ppt_task, placement.batch_part())
        ppt.check_same(saved, text.data, config)
        backbone, loaded = load_weights(ppt_task.backbone, placement)
        ppt_task = ppt_task.with_backbone(backbone)
        return make_prepared_prompt(config, placement, ppt_task, text, loaded, corpus.token_counts)

    def build(self, prepared: PreparedPrompt) -> Job:
        """Initialises the prompt, makes the step, and counts its FLOPs."""
        config, placement, text = self.config, prepared.placement, prepared.text
        train_examples, held_out = text.tasks
        ppt_model = ppt.make_ppt_model(
            config, prepared.ppt_task, prepared.loaded, placement, prepared.counts
        )
        score_held = denoising.make_held_out_scorer(
            placement, ppt_model, text.held_out, config.seed, ppt.scoring(held_out)
        )
        tx, state = init_train_state(config, prepared, ppt_model.trainable)
        flops = ppt.count_ppt_flops(
            ppt_model, tx, state, next(iter(text.held_out)), config.data.batch, placement
        )
        accumulate = config.optim.accumulate
        return Job(
            step=make_train_step(ppt_model.model, tx, ppt_model.objectives, accumulate=accumulate),
            state=state,
            frozen=ppt_model.frozen,
            feed=functools.partial(
                denoising.feed_rows,
                config,
                text.rows,
                placement,
                ppt.scoring(train_examples),
                flops,
            ),
            measure=score_held,
            value=denoising.held_out_value,
            # None is the dropout of config.json, and so counts as some.
            has_dropout=config.backbone.dropout != 0 or config.prompt.get("dropout", 0) != 0,
        )

    def lines(self, prepared: PreparedPrompt, job: Job, start_message: str) -> Iterator[str]:
        """Yields log lines: what was read, what was left out, and what trains."""
        config, backbone = self.config, prepared.ppt_task.backbone
        yield from ppt.corpus_lines(config, backbone, prepared.loaded.report, prepared.text.corpus)
        yield from ppt.task_lines(prepared.ppt_task, prepared.text)
        yield tree.parameter_table(job.state.trainable, job.frozen)
        batch_shape = f"{config.data.batch} x {config.data.max_len} tokens"
        yield f"{prepared.milestones.total} steps of {batch_shape}, {start_message}"
        yield from kernel_notes(config, prepared.placement, backbone)

    def finish(self, prepared: PreparedPrompt, job: Job, outcome: TrainOutcome) -> RunResult:
        """Makes the result; `export` writes the prompt."""
        task, method = self.config.ppt.task, self.config.prompt.name
        scores = outcome.best.dev
        return make_result(self.config, job, outcome, task=task, method=method, held_out=scores)
