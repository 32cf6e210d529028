"""A run that pre-trains a prompt: on a corpus (Gu et al. 2022, "PPT"), or on texts with topics."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

import jax
import numpy as np
import optax

from jaxprompt import rng, tree
from jaxprompt.build.backbone import load_weights
from jaxprompt.build.check import check_config
from jaxprompt.build.corpus import read_corpus, require_corpus
from jaxprompt.build.inheritance import init_notes
from jaxprompt.build.initial_params import InitialParams, count_tokens, init_params
from jaxprompt.build.layers import layer_notes, measure_corpus_work, separates_layers
from jaxprompt.build.method import get_head, get_method, prompt_starts
from jaxprompt.build.optimizer import build_optimizer, config_milestones, uses_epoch_length
from jaxprompt.build.placement import build_placement, kernel_notes
from jaxprompt.build.scorer import build_scorer, example_layout
from jaxprompt.build.task import open_checked_backbone
from jaxprompt.config.run import (
    CHANGEABLE_AFTER_TRAINING,
    CHANGEABLE_FIELDS,
    PPTConfig,
    RunConfig,
    TaskConfig,
)
from jaxprompt.convert.load import Loaded, LoadReport
from jaxprompt.corpus import Corpus, check_unchanged, split_held_out
from jaxprompt.corpus.denoise.batches import EvalBatches
from jaxprompt.corpus.ppt import (
    PUBLISHED_THRESHOLDS,
    Annotations,
    Forms,
    PptSamples,
    check_classes,
    check_thresholds,
    cls,
    get_pattern,
    make_forms,
    nsp,
    option_counts,
    selection,
)
from jaxprompt.corpus.ppt.patterns import text_fields
from jaxprompt.data.tasks.task import Task
from jaxprompt.data.text.identity import scorer_fingerprints
from jaxprompt.data.text.overview import label_word_messages
from jaxprompt.data.text.tokenizer import num_segments
from jaxprompt.errors import InputError, brief, with_article
from jaxprompt.heads import verbalizer
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Backbone, Scorer
from jaxprompt.parallel.flops import count_flops
from jaxprompt.parallel.sharding import Placement, with_placement
from jaxprompt.runs import record as records
from jaxprompt.runs import train as tune
from jaxprompt.runs.adapt import (
    Sums,
    feed_rows,
    held_out_value,
    make_held_out_scorer,
    without_kernels,
)
from jaxprompt.runs.grid.batched_steps import PerRun, Programs
from jaxprompt.runs.grid.expand import GridRun
from jaxprompt.runs.grid.group import GroupInputs, Member, side_by_side
from jaxprompt.runs.restore import RestoredRun
from jaxprompt.runs.running import (
    PreparedWithWeights,
    RunStages,
    init_train_state,
    make_result,
    open_corpus,
    run_stages,
)
from jaxprompt.scoring import metrics
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.evaluation import dispatch_ahead
from jaxprompt.training.one_run import Job, TrainOutcome
from jaxprompt.training.progress import Evaluation
from jaxprompt.training.run_folder import read_record
from jaxprompt.training.run_record import (
    BackboneRecord,
    CorpusInfo,
    PretrainingData,
    PretrainingRecord,
)
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.state import TrainState, make_state
from jaxprompt.training.steps import make_train_step
from jaxprompt.tree import Flat
from jaxprompt.types import Batch, Objective

Examples: TypeAlias = cls.Classification | nsp.NextSentence | selection.Selection


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


class PptTask(NamedTuple):
    """A pre-training task formatted for a backbone, and its scorer."""

    backbone: Backbone
    scorer: Scorer  # of the most options
    forms: Forms

    def with_backbone(self, backbone: Backbone) -> Self:
        """Returns a copy with a backbone whose weights are loaded."""
        return self._replace(backbone=backbone, scorer=self.scorer.with_backbone(backbone))


class PptModel(NamedTuple):
    """The model, and its initial parameters."""

    model: Model
    objectives: list[Objective]
    trainable: tree.Flat  # float32, the prompt
    frozen: tree.Flat
    report: LoadReport


def check_ppt(config: RunConfig) -> None:
    """Raises InputError if a config lacks required fields or has fields that `pretrain` rejects.

    Reads nothing except the annotations.
    """
    if not config.ppt.task:
        raise InputError("ppt.task is empty; give one of nsp, nss, unified, cls")
    require_corpus(config, held_out=True)
    _check_unused(config)
    check_trainable_prompt(config)
    open_annotations(config)


def _check_unused(config: RunConfig) -> None:
    """Raises InputError for fields that define a task: the pre-training task replaces them."""
    unused = TaskConfig().leaves("task.")
    data_fields = ("source", "only", "protocol.name", "files.train", "files.dev", "files.test")
    unused |= {"ppt.hard": False} | {f"data.{name}": "" for name in data_fields}
    values = config.leaves()
    # Sorted, so that all processes name the same field.
    for field in sorted(unused.keys() - {"task.answer", "task.eos"}):
        value = values[field]
        if value != unused[field]:
            text = brief(",".join(map(str, value)) if isinstance(value, tuple) else value)
            raise InputError(
                f"{field}={text} has no effect in pretrain, whose examples and label "
                f"words come from ppt.task={config.ppt.task}; leave it out"
            )


def unused_field_lines(config: RunConfig) -> list[str]:
    """Returns log lines for fields of the block `ppt` that have no effect on its task."""
    tasks_by_field = {
        "min_options": ("unified",), "max_options": ("unified",), "annotations": ("cls",),
        "thresholds": ("cls",), "matched": ("nsp", "nss", "unified"),
    }  # fmt: skip
    return [
        f"ppt.{name}={brief(value)} has no effect: ppt.task is {config.ppt.task}"
        for name, tasks in tasks_by_field.items()
        for value in [getattr(config.ppt, name)]
        if config.ppt.task not in tasks and value != getattr(PPTConfig(), name)
    ]


def check_trainable_prompt(config: RunConfig) -> None:
    """Raises InputError if `pretrain` cannot train what a config asks for, whatever the text."""
    method = get_method(config)
    if not method.LEARNS:
        raise InputError(
            f"prompt.name={config.prompt.name} has nothing to train; use soft or prefix"
        )
    if method.with_vocabulary(np.zeros(1, int)).seen:
        raise InputError(
            "prompt.rows=seen stores the vectors of words in training examples, which pretrain "
            "does not have; set prompt.rows=all"
        )
    if "task" in prompt_starts(config):
        raise InputError(
            "prompt.start=task uses words of training examples, which pretrain does not have; use "
            "normal, uniform, vocab, frequent, labels, text or file"
        )
    if config.trainable:
        raise InputError(
            "trainable must be empty, because pretrain trains only the prompt; empty it"
        )
    if not isinstance(get_head(config), verbalizer.Head):
        raise InputError(
            f"head.name={config.head.name} does not use label words; set head.name=verbalizer"
        )
    if config.cache.location:
        raise InputError(
            f"cache.location={config.cache.location} caches states of sequences that repeat, but "
            "in pretrain none does; set it to ''"
        )
    options_of(config)


def options_of(config: RunConfig) -> tuple[int, ...]:
    """Returns the possible numbers of options of an example, (0,) if it has none."""
    if config.ppt.task not in ("nss", "unified"):
        return (0,)
    return option_counts(config.ppt.task, config.ppt.min_options, config.ppt.max_options)


def open_annotations(config: RunConfig) -> Annotations | None:
    """Opens the labels that cls needs. Raises InputError if its words have other classes."""
    if config.ppt.task != "cls":
        return None
    if not config.ppt.annotations:
        raise InputError("ppt.annotations is empty; cls needs the folder that `annotate` wrote")
    annotations = Annotations(config.ppt.annotations)
    words = get_pattern(config.ppt.task, config.ppt.patterns).words
    check_classes(annotations.classes, len(words))
    check_thresholds(annotations.classes, thresholds_of(config))
    return annotations


def thresholds_of(config: RunConfig) -> tuple[float, ...]:
    """Returns the probability threshold of a label, by class."""
    return tuple(config.ppt.thresholds) or PUBLISHED_THRESHOLDS


# -- model ----------------------------------------------------------------------------------------


def open_task(config: RunConfig, placement: Placement, *, restored: bool = False) -> PptTask:
    """Opens the backbone and formats the task; `restored` as in `open_checked_backbone`."""
    backbone = open_checked_backbone(config, placement, restored=restored)
    scorer = make_scorer(config, backbone, placement)
    method, cfg, style = scorer.model.prompt, backbone.module.cfg, backbone.module.STYLE
    forms = make_forms(
        get_pattern(config.ppt.task, config.ppt.patterns),
        scorer.tokenizer,
        style,
        num_slots=method.num_slots(),
        max_len=config.data.max_len,
        options=options_of(config),
        start=getattr(cfg, "start", 0),
        decoder_slots=method.num_decoder_slots(),
        eos=config.task.eos,
        sentinel=config.backbone.sentinel,
        num_types=num_segments(scorer.tokenizer, cfg.types),
        whole=config.head.get("span") == "target",
        answer=config.task.answer,
    )
    return PptTask(backbone, scorer, forms)


def make_scorer(config: RunConfig, backbone: Backbone, placement: Placement) -> Scorer:
    """Formats the task, with its most options, like a downstream classification task."""
    pattern = get_pattern(config.ppt.task, config.ppt.patterns)
    max_options = max(options_of(config))
    template, style = pattern.text(max_options), backbone.module.STYLE
    if style == "causal" and not template.endswith("[mask]"):
        raise InputError(
            f"ppt.task={config.ppt.task} with ppt.patterns={config.ppt.patterns} has text after "
            f"[mask], which {with_article(backbone.family)} cannot read there; set ppt.patterns="
            f"{config.ppt.patterns.partition('_')[0]}_end, or use another backbone"
        )
    task = Task(
        config.ppt.task,
        text_fields(config.ppt.task, max_options),
        labels=pattern.words,
        template=template,
        words=tuple((word,) for word in pattern.words),
        spaced=pattern.space,
    )
    return build_scorer(
        backbone,
        task,
        dataclasses.replace(example_layout(config), form="cloze"),
        prompt=config.prompt,
        head=config.head,
        template=template,
        batch=config.data.eval_batch,
        placement=placement,
    )


# -- text -----------------------------------------------------------------------------------------


class CorpusExamples(NamedTuple):
    """The examples of a corpus, from training documents and from held-out ones."""

    corpus: Corpus
    tasks: tuple[Examples, Examples]
    rows: PptSamples  # for training
    held_out: EvalBatches
    data: PretrainingData
    classes: tuple[str, ...] = ()  # of the annotator, by the label words of cls


def make_corpus_examples(
    config: RunConfig, corpus: Corpus, ppt_task: PptTask, share: tuple[int, int]
) -> CorpusExamples:
    """Makes the examples. Raises InputError if there are too few documents.

    `share` is (part, parts): which part of a held-out batch this process loads.
    """
    labels = open_annotations(config)
    train, dev = (
        _make_examples(config, corpus, documents, ppt_task.forms, labels)
        for documents in split_held_out(len(corpus), config.corpus.held_out, config.data.seed)
    )
    rows, dev_rows = (
        PptSamples(examples, ppt_task.forms, ppt_task.scorer.layout) for examples in (train, dev)
    )
    held_out = EvalBatches(
        dev_rows,
        batch=config.data.eval_batch,
        seed=config.data.seed,
        limit=config.corpus.dev_rows,
        share=share,
    )
    options = options_of(config)
    info = CorpusInfo(
        task=config.ppt.task,
        patterns=config.ppt.patterns,
        options=(min(options), max(options)) if max(options) else None,
        corpus=config.corpus.path,
        documents=len(corpus),
        tokens=corpus.num_tokens,
    )
    label_record: tuple[object, ...] | None = None
    if labels is not None:
        assert isinstance(train, cls.Classification) and isinstance(dev, cls.Classification)
        label_record = (labels.annotator, *train.counts.tolist(), train.digest, dev.digest)
    data = PretrainingData(
        corpus=corpus.fingerprint,
        store=corpus.checksums,
        labels=label_record,
        about=info,
        identity=scorer_fingerprints(ppt_task.scorer),
        template=ppt_task.scorer.template,
    )
    return CorpusExamples(
        corpus, (train, dev), rows, held_out, data, () if labels is None else labels.classes
    )


def _make_examples(
    config: RunConfig,
    corpus: Corpus,
    documents: np.ndarray,
    forms: Forms,
    labels: Annotations | None,
) -> Examples:
    if labels is not None:
        return cls.make(corpus, documents, forms, labels, thresholds_of(config))
    if config.ppt.task == "nsp":
        return nsp.make(corpus, documents, forms, matched=config.ppt.matched)
    return selection.make(config.ppt.task, corpus, documents, forms, matched=config.ppt.matched)


def corpus_lines(
    config: RunConfig, backbone: Backbone, report: LoadReport, corpus: Corpus
) -> list[str]:
    """Returns log lines about the backbone and the corpus."""
    return [
        f"backbone {config.backbone.path} ({backbone.family}), weights {report.fingerprint[:12]}",
        *init_notes(config, backbone.module.dims),
        f"corpus {config.corpus.path}: {len(corpus):,} documents, {corpus.num_tokens:,} tokens",
        *corpus.notes(),
        *unused_field_lines(config),
    ]


def task_lines(ppt_task: PptTask, text: CorpusExamples) -> list[str]:
    """Returns log lines about the task: label words, and which text is used or left out."""
    words = ppt_task.forms.verbalizer.words
    first_words = ", ".join(entry[0] for entry in words)
    word_lines = label_word_messages(text.classes, words) or [f"label words: {first_words}"]
    return [
        f"task {ppt_task.scorer.task.name}, template {ppt_task.scorer.template!r}",
        f"  {word_lines[0]}",
        f"  training: {text.tasks[0].summary()}",
        f"  held out: {text.tasks[1].summary()}; {text.held_out.size:,} of them are scored",
    ]


def examples_key(config: RunConfig) -> str:
    """Returns a key of the fields that examples depend on and that may differ between runs."""
    return json.dumps([config.ppt.to_dict(), config.data.seed], sort_keys=True)


def check_same(saved: PretrainingData | None, data: PretrainingData, config: RunConfig) -> None:
    """Raises InputError if the text or its labels differ from the record of a run."""
    if saved is None:
        return
    check_unchanged(saved.corpus, data.corpus)
    if saved.labels != data.labels:
        raise InputError(
            f"ppt.annotations={config.ppt.annotations} has different labels than the saved run; "
            "restore them, or use another workdir"
        )


# -- params ---------------------------------------------------------------------------------------


def make_ppt_model(
    config: RunConfig,
    ppt_task: PptTask,
    loaded: Loaded,
    placement: Placement,
    counts: np.ndarray | None = None,
    *,
    restored: bool = False,
) -> PptModel:
    """Initialises the prompt of a task whose backbone is loaded; otherwise as `init_params`."""
    trainable, frozen, report = init_params(
        config, ppt_task.scorer, loaded, counts, placement, restored=restored
    )
    model, objectives = make_objectives(config, ppt_task.scorer.model)
    return PptModel(model, objectives, trainable, frozen, report)


def make_objectives(config: RunConfig, model: Model) -> tuple[Model, list[Objective]]:
    """Makes the losses of downstream tuning with accuracy counts. Returns (model, losses)."""
    prompt_modules = model.prompt.modules()
    heads = {name: head for name, head in model.heads.items() if name not in prompt_modules}
    verbalizer_head = get_head(config)
    assert isinstance(verbalizer_head, verbalizer.Head)  # by `check_trainable_prompt`
    heads, objective = verbalizer_head.counted_objective(heads, config.optim.label_smoothing)
    model = dataclasses.replace(model, heads=prompt_modules | heads)
    return model, [objective, *model.prompt.objectives()]


def count_ppt_flops(
    ppt_model: PptModel,
    tx: optax.GradientTransformation,
    state: TrainState,
    like: Batch,
    rows: int,
    placement: Placement,
) -> float:
    """Counts the model FLOPs of a training step on `rows` sequences like those of a batch.

    The backward pass computes no gradients of frozen weights.
    """

    def step_shape(x):
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

    step = make_train_step(without_kernels(ppt_model.model), tx, ppt_model.objectives)
    return count_flops(
        with_placement(placement, step), state, ppt_model.frozen, jax.tree.map(step_shape, like)
    )


def scoring(task: Examples) -> Callable[[Sums], dict[str, float]]:
    """Returns a function from sums of objectives to the scores of a task."""
    return lambda sums: metrics.score_classes(sums["main"], task.majority)


# -- stages ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PreparedPrompt(PreparedWithWeights[PretrainingRecord]):
    """A pre-training task on a corpus, and the backbone."""

    ppt_task: PptTask
    text: CorpusExamples
    counts: np.ndarray | None  # of tokens of the corpus, where the prompt starts from them


def make_prepared_prompt(
    config: RunConfig,
    placement: Placement,
    ppt_task: PptTask,
    text: CorpusExamples,
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


def _load_weights(
    config: RunConfig,
    ppt_task: PptTask,
    text: CorpusExamples,
    placement: Placement,
    runs: int = 1,
) -> tuple[Backbone, Loaded]:
    """Loads the weights of a backbone that `runs` runs train with at once."""
    steps_per_epoch = -(-len(text.rows) // config.data.batch)
    steps = config_milestones(config, steps_per_epoch, len(text.rows)).total
    work = measure_corpus_work(config, steps, runs)
    backbone = ppt_task.backbone
    separate_layers = separates_layers(backbone, placement, work=work, trainable=config.trainable)
    return load_weights(backbone, placement, separate_layers=separate_layers)


class PretrainStages(RunStages[PretrainingRecord, PreparedPrompt, Job]):
    """Trains on documents of a corpus, and evaluates on held-out ones."""

    DONE, RECORD = "pre-trained", PretrainingRecord

    def check(self) -> None:
        """Checks the config, and reads the annotations if there are any."""
        check_config(self.config)
        check_ppt(self.config)

    def prepare(self, saved: PretrainingRecord | None, resume_step: int | None) -> PreparedPrompt:
        """Indexes the corpus if needed, and loads the backbone."""
        config, placement = self.config, build_placement(self.config)
        ppt_task = open_task(config, placement)
        vocab = ppt_task.backbone.module.cfg.vocab
        corpus = open_corpus(config, ppt_task.scorer.tokenizer, vocab, self.workdir, resume_step)
        text = make_corpus_examples(config, corpus, ppt_task, placement.batch_part())
        check_same(saved, text.data, config)
        backbone, loaded = _load_weights(config, ppt_task, text, placement)
        ppt_task = ppt_task.with_backbone(backbone)
        return make_prepared_prompt(config, placement, ppt_task, text, loaded, corpus.token_counts)

    def build(self, prepared: PreparedPrompt) -> Job:
        """Initialises the prompt, makes the step, and counts its FLOPs."""
        config, placement, text = self.config, prepared.placement, prepared.text
        train_examples, held_out = text.tasks
        ppt_model = make_ppt_model(
            config, prepared.ppt_task, prepared.loaded, placement, prepared.counts
        )
        score_held = make_held_out_scorer(
            placement, ppt_model, text.held_out, config.seed, scoring(held_out)
        )
        tx, state = init_train_state(config, prepared, ppt_model.trainable)
        flops = count_ppt_flops(
            ppt_model, tx, state, next(iter(text.held_out)), config.data.batch, placement
        )
        accumulate = config.optim.accumulate
        return Job(
            step=make_train_step(ppt_model.model, tx, ppt_model.objectives, accumulate=accumulate),
            state=state,
            frozen=ppt_model.frozen,
            feed=functools.partial(
                feed_rows,
                config,
                text.rows,
                placement,
                scoring(train_examples),
                flops,
            ),
            measure=score_held,
            metric="loss",
            value=held_out_value,
            has_dropout=config.backbone.may_drop or config.prompt.get("dropout", 0) != 0,
        )

    def lines(self, prepared: PreparedPrompt, job: Job, start_message: str) -> Iterator[str]:
        """Yields log lines: what was read, what was left out, and what trains."""
        config, backbone = self.config, prepared.ppt_task.backbone
        yield from corpus_lines(config, backbone, prepared.loaded.report, prepared.text.corpus)
        yield from task_lines(prepared.ppt_task, prepared.text)
        yield tree.parameter_table(job.state.trainable, job.frozen)
        batch_shape = f"{config.data.batch} x {config.data.max_len} tokens"
        yield f"{prepared.milestones.total} steps of {batch_shape}, {start_message}"
        yield from kernel_notes(config, prepared.placement, backbone)
        yield from layer_notes(prepared.placement, job.frozen)

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
    ppt_tasks: dict[str, PptTask] = {}
    texts: dict[str, CorpusExamples] = {}
    corpus, readable = None, []
    for run in runs:
        key = examples_key(run.config)
        try:
            if key not in ppt_tasks:
                ppt_tasks[key] = open_task(run.config, placement, restored=True)
        except InputError as error:
            mark_failed(run, error)
            continue
        if corpus is None:  # an error in it is one of all runs
            tokenizer, module = ppt_tasks[key].scorer.tokenizer, ppt_tasks[key].backbone.module
            corpus = read_corpus(config, tokenizer, module.cfg.vocab, workdir)
        try:
            if key not in texts:
                texts[key] = make_corpus_examples(
                    run.config, corpus, ppt_tasks[key], placement.batch_part()
                )
        except InputError as error:
            mark_failed(run, error)
            continue
        check_same(read_record(run.folder, PretrainingRecord), texts[key].data, config)
        readable.append((run, key))
    if corpus is None or not readable:
        return None, []
    ppt_task, text = ppt_tasks[readable[0][1]], texts[readable[0][1]]
    backbone, loaded = _load_weights(config, ppt_task, text, placement, runs=len(readable))
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
    objectives = make_objectives(config, members[0].scorer.model)[1]
    lines = corpus_lines(config, backbone, loaded.report, corpus)
    lines += [*kernel_notes(config, placement, backbone), *layer_notes(placement, loaded.params)]
    for key, text in texts.items():
        lines += task_lines(ppt_tasks[key], text)
    shared = GroupInputs(
        config, placement, loaded, objectives, HeldOutScorer, lines, pretrains=True
    )
    return shared, members


def _member(run: GridRun, prepared: PreparedPrompt, flops: float) -> Member:
    config, scorer, text = run.config, prepared.ppt_task.scorer, prepared.text
    score = scoring(text.tasks[0])
    # All else that depends on the length of an epoch is in the milestones.
    epoch = prepared.steps_per_epoch if uses_epoch_length(config) else 0
    return Member(
        run,
        scorer,
        make_objectives(config, scorer.model)[0],
        prepared.milestones,
        prepared.steps_per_epoch,
        (epoch, scorer.layout),
        source=text,
        feed=functools.partial(feed_rows, config, text.rows, prepared.placement, score, flops),
        longest=functools.partial(_longest, config, text),
        eval_data=text,
        record=prepared.record,
        counts=prepared.counts,
    )


def _longest(config: RunConfig, text: CorpusExamples) -> Batch:
    batch = config.data.batch
    return next(iter(EvalBatches(text.rows, batch=batch, seed=config.seed, limit=batch)))


def _flops(config: RunConfig, prepared: PreparedPrompt) -> float:
    """Counts the model FLOPs of a step of one run."""
    placement, like = prepared.placement, next(iter(prepared.text.held_out))
    # Only shapes matter, so the run's own initialisation is not needed.
    ppt_model = make_ppt_model(config, prepared.ppt_task, prepared.loaded, placement, restored=True)
    tx = build_optimizer(config, ppt_model.trainable, prepared.milestones, prepared.steps_per_epoch)
    state = make_state(ppt_model.trainable, tx, rng.key_for(config.seed, "dropout", config.rng))
    return count_ppt_flops(ppt_model, tx, state, like, config.data.batch, placement)


class HeldOutScorer:
    """Evaluates runs of one program on held-out documents. `Member.eval_data` are its examples."""

    metric = "loss"

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

        def run_sums(row):
            return jax.tree.map(lambda x: x[row], total)

        return [scoring(text.tasks[1])(run_sums(row)) for row, text in enumerate(texts)]


# -- what comes out -------------------------------------------------------------------------------


def restore_pretrained(config: RunConfig, workdir: str) -> RestoredRun:
    """Restores the best prompt of a workdir, without text. Errors as in restore_run."""
    check_config(config)
    free = (*CHANGEABLE_FIELDS, *CHANGEABLE_AFTER_TRAINING)
    record, step = records.read_trained(workdir, config, free, PretrainingRecord)
    placement = build_placement(config)
    ppt_task = open_task(config, placement, restored=True)
    backbone, loaded = load_weights(ppt_task.backbone, placement)
    ppt_task = ppt_task.with_backbone(backbone)
    ppt_model = make_ppt_model(config, ppt_task, loaded, placement, restored=True)
    records.check_backbone(record, ppt_model.report.fingerprint, workdir, {})
    trainable, evaluation = Checkpoints(workdir).restore_best(
        ppt_model.trainable, step, or_newer=True
    )
    best = Evaluation(**evaluation)
    weights = InitialParams(trainable, ppt_model.frozen, ppt_model.report)
    return RestoredRun(
        placement, ppt_task.scorer, {}, weights, best, ppt_task.backbone.family, record
    )


def pretraining_summary(trained: RestoredRun) -> dict[str, object]:
    """Returns what a prompt was pre-trained on, and its scores."""
    record, best = trained.record, trained.best
    assert isinstance(record, PretrainingRecord) and best is not None
    return record.about.to_json() | {"steps": best.step, "held_out": best.dev}
