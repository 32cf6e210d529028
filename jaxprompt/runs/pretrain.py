"""A run that pre-trains a prompt: on a corpus (Gu et al. 2022, "PPT"), or on texts with topics."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxprompt import rng, tree
from jaxprompt.build.backbone import load_weights
from jaxprompt.build.check import check_config
from jaxprompt.build.corpus import read_corpus
from jaxprompt.build.initial_params import count_tokens
from jaxprompt.build.method import get_head, get_method
from jaxprompt.build.optimizer import build_optimizer, config_milestones, uses_epoch_length
from jaxprompt.build.placement import build_placement, kernel_notes
from jaxprompt.config.run import RunConfig
from jaxprompt.convert.load import Loaded
from jaxprompt.corpus.denoise.batches import EvalBatches
from jaxprompt.errors import InputError
from jaxprompt.models.model import Model
from jaxprompt.parallel.sharding import Placement
from jaxprompt.runs import denoising, ppt
from jaxprompt.runs import record as records
from jaxprompt.runs import train as tune
from jaxprompt.runs.grid.batched_steps import PerRun, Programs
from jaxprompt.runs.grid.expand import GridRun
from jaxprompt.runs.grid.group import GroupInputs, Member, side_by_side
from jaxprompt.runs.running import (
    PreparedWithWeights,
    RunStages,
    init_train_state,
    make_result,
    open_corpus,
    run_stages,
)
from jaxprompt.training.evaluation import dispatch_ahead
from jaxprompt.training.one_run import Job, TrainOutcome
from jaxprompt.training.run_folder import read_record
from jaxprompt.training.run_record import BackboneRecord, PretrainingRecord
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_train_step
from jaxprompt.tree import Flat
from jaxprompt.types import Batch


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


# -- grids ----------------------------------------------------------------------------------------


def prepare_corpus_group(
    runs: Sequence[GridRun], workdir: Path, mark_failed: Callable[[GridRun, Exception], None]
) -> tuple[GroupInputs | None, list[Member]]:
    """Reads the corpus once, and makes the tasks that runs train on.

    Invalid runs are passed to `mark_failed`; if all are invalid, GroupInputs is None. Raises
    InputError for a corpus that has changed.
    """
    config = runs[0].config
    placement = build_placement(config)
    ppt_tasks: dict[str, ppt.PptTask] = {}
    texts: dict[str, ppt.CorpusExamples] = {}
    corpus, readable = None, []
    for run in runs:
        key = ppt.examples_key(run.config)
        try:
            if key not in ppt_tasks:
                ppt_tasks[key] = ppt.open_task(run.config, placement, restored=True)
        except InputError as error:
            mark_failed(run, error)
            continue
        if corpus is None:  # an error in it is one of all runs
            tokenizer, module = ppt_tasks[key].scorer.tokenizer, ppt_tasks[key].backbone.module
            corpus = read_corpus(config, tokenizer, module.cfg.vocab, workdir)
        try:
            if key not in texts:
                texts[key] = ppt.make_corpus_examples(
                    run.config, corpus, ppt_tasks[key], placement.batch_part()
                )
        except InputError as error:
            mark_failed(run, error)
            continue
        ppt.check_same(read_record(run.folder, PretrainingRecord), texts[key].data, config)
        readable.append((run, key))
    if corpus is None or not readable:
        return None, []
    backbone, loaded = load_weights(ppt_tasks[readable[0][1]].backbone, placement)
    models: dict[str, Model] = {}
    flops: dict[str, float] = {}
    members, token_counts = [], functools.cache(corpus.token_counts)
    for run, key in readable:
        ppt_task = ppt_tasks[key].with_backbone(backbone)
        prompt = get_method(run.config, backbone.module.dims)
        # Runs with equal models share one, so that its programs are compiled once.
        model = dataclasses.replace(ppt_task.scorer.model, prompt=prompt)
        model = models.setdefault(json.dumps([prompt.block(), key]), model)
        ppt_task = ppt_task._replace(scorer=ppt_task.scorer._replace(model=model))
        prepared = make_prepared_prompt(
            run.config, placement, ppt_task, texts[key], loaded, token_counts
        )
        records.check_same_data(run.folder, prepared.record)
        if key not in flops:
            flops[key] = _flops(run.config, prepared)
        members.append(_member(run, prepared, flops[key]))
    objectives = ppt.make_objectives(config, members[0].scorer.model)[1]
    lines = ppt.corpus_lines(config, backbone, loaded.report, corpus)
    lines += kernel_notes(config, placement, backbone)
    for key, text in texts.items():
        lines += ppt.task_lines(ppt_tasks[key], text)
    shared = GroupInputs(
        config, placement, loaded, objectives, HeldOutScorer, lines, pretrains=True
    )
    return shared, members


def _member(run: GridRun, prepared: PreparedPrompt, flops: float) -> Member:
    config, scorer, text = run.config, prepared.ppt_task.scorer, prepared.text
    score = ppt.scoring(text.tasks[0])
    # All else that depends on the length of an epoch is in the milestones.
    epoch = prepared.steps_per_epoch if uses_epoch_length(config) else 0
    return Member(
        run,
        scorer,
        ppt.make_objectives(config, scorer.model)[0],
        prepared.milestones,
        prepared.steps_per_epoch,
        (epoch, scorer.layout),
        source=text,
        feed=functools.partial(
            denoising.feed_rows, config, text.rows, prepared.placement, score, flops
        ),
        longest=functools.partial(_longest, config, text),
        eval_data=text,
        record=prepared.record,
        counts=prepared.counts,
    )


def _longest(config: RunConfig, text: ppt.CorpusExamples) -> Batch:
    batch = config.data.batch
    return next(iter(EvalBatches(text.rows, batch=batch, seed=config.seed, limit=batch)))


def _flops(config: RunConfig, prepared: PreparedPrompt) -> float:
    """Counts the model FLOPs of a step of one run."""
    placement, like = prepared.placement, next(iter(prepared.text.held_out))
    # Only shapes matter, so the run's own initialisation is not needed.
    learner = ppt.make_ppt_model(
        config, prepared.ppt_task, prepared.loaded, placement, restored=True
    )
    tx = build_optimizer(config, learner.trainable, prepared.milestones, prepared.steps_per_epoch)
    state = make_state(learner.trainable, tx, rng.key_for(config.seed, "dropout", config.rng))
    return ppt.count_ppt_flops(learner, tx, state, like, config.data.batch, placement)


class HeldOutScorer:
    """Evaluates runs of one program on held-out documents. `Member.eval_data` is a Text."""

    def __init__(self, shared: GroupInputs, members: Sequence[Member], programs: Programs):
        """Takes all runs of the program."""
        self._members, self._programs = members, programs

    def has(self, split: str) -> bool:
        """Returns whether there is a split: only held-out documents."""
        return split == "dev"

    def value(self, dev: dict[str, float]) -> float:
        """Returns the selection score; higher is better."""
        return -dev["loss"]

    def score(
        self,
        split: str,
        rows: Sequence[int],
        trainable: Flat,
        per_run: PerRun,
        devs: Sequence[Mapping[str, float]] | None = None,
    ) -> list[dict[str, float]]:
        """Returns the held-out scores of the runs `rows`."""
        del split, devs
        texts = [self._members[i].eval_data for i in rows]
        is_shared = all(text is texts[0] for text in texts)
        passes = [text.held_out for text in (texts[:1] if is_shared else texts)]
        layout, total = self._members[0].scorer.layout, None
        batch_sums = (
            self._programs.counts(
                trainable,
                batches[0] if is_shared else batch,
                per_run,
                len(rows),
                is_shared=is_shared,
            )
            for batches, batch in side_by_side(passes, layout)
        )
        for sums in dispatch_ahead(batch_sums):
            # In float64, because float32 sums over many batches lose small terms.
            sums = jax.tree.map(np.float64, jax.device_get(sums))
            total = sums if total is None else jax.tree.map(np.add, total, sums)
        run_sums = lambda row: jax.tree.map(lambda x: x[row], total)
        return [ppt.scoring(text.tasks[1])(run_sums(row)) for row, text in enumerate(texts)]
