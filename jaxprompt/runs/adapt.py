"""A run that continues the pre-training of a backbone on a corpus."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jaxprompt import rng, tree
from jaxprompt.backbones import with_lm_states
from jaxprompt.build import new_backbone
from jaxprompt.build.backbone import backbone_from_config, load_weights, open_backbone
from jaxprompt.build.check import check_config
from jaxprompt.build.corpus import require_corpus
from jaxprompt.build.initial_params import float32_copy
from jaxprompt.build.optimizer import config_milestones
from jaxprompt.build.placement import build_placement, check_mesh, kernel_notes
from jaxprompt.config.run import (
    CausalLM,
    MaskedLM,
    OnText,
    PrefixLM,
    ReplacedTokens,
    RunConfig,
    SpanCorruption,
)
from jaxprompt.convert.load import Loaded, LoadReport
from jaxprompt.convert.save import save_backbone
from jaxprompt.corpus import Corpus, check_unchanged, split_held_out
from jaxprompt.corpus.denoise import clm, mlm, prefix_lm, span_corruption
from jaxprompt.corpus.denoise.batches import (
    DenoisingSamples,
    EvalBatches,
    SampleSource,
    ShuffledBatches,
)
from jaxprompt.corpus.denoise.samples import DenoisingObjective
from jaxprompt.data.text.identity import fingerprints
from jaxprompt.data.text.tokenizer import Tokenizer, load_tokenizer
from jaxprompt.errors import InputError, with_article
from jaxprompt.files import write_atomic
from jaxprompt.heads.pretraining import TargetHead
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Backbone
from jaxprompt.parallel import processes
from jaxprompt.parallel.compilation import enable_compilation_cache, jit
from jaxprompt.parallel.flops import count_flops
from jaxprompt.parallel.sharding import DATA, Placement, check_padding, put_batch, with_placement
from jaxprompt.prompts import make_prompt
from jaxprompt.runs.fill_report import make_fill_step, render
from jaxprompt.runs.grid.expand import is_grid
from jaxprompt.runs.replaced_tokens import (
    Pair,
    generator_config,
    make_objectives,
    make_pair,
    tie_embeddings,
    untie_embeddings,
)
from jaxprompt.runs.running import (
    RunStages,
    agree_on,
    agreed_settings,
    init_train_state,
    make_result,
    open_corpus,
    run_stages,
)
from jaxprompt.scoring import metrics
from jaxprompt.scoring.losses import count_hits, target_loss
from jaxprompt.training import run_folder
from jaxprompt.training.evaluation import dispatch_ahead
from jaxprompt.training.one_run import Feed, Job, Prepared, TrainOutcome
from jaxprompt.training.run_record import AdaptationRecord, BackboneRecord
from jaxprompt.training.run_result import RunResult
from jaxprompt.training.steps import make_count_step, make_train_step
from jaxprompt.training.throughput import Meter
from jaxprompt.tree import Flat
from jaxprompt.types import Batch, Objective

# Objective -> the style of backbone that it needs, and the head, which is created if missing.
NEEDS = {
    "mlm": ("masked", "mlm"), "rtd": ("masked", "rtd"), "clm": ("causal", "lm"),
    "prefix_lm": ("seq2seq", "lm"), "span_corruption": ("seq2seq", "lm"),
}  # fmt: skip

Sums = Mapping[str, Mapping[str, float]]  # objective -> what it counts


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


class AdaptableModel(NamedTuple):
    """A backbone, its pre-training objectives, and its initial parameters."""

    backbone: Backbone
    generator: Backbone | None  # rtd
    model: Model | Pair
    objectives: list[Objective]
    trainable: tree.Flat  # float32
    frozen: tree.Flat
    report: LoadReport
    fingerprint: str  # of all initial weights


def check_objective(config: RunConfig) -> None:
    """Raises InputError if a config cannot be used with `adapt`."""
    unused = {
        "optim.label_smoothing": config.optim.label_smoothing,
        "cache.location": config.cache.location,
        "train.init_head": config.train.init_head, "data.protocol": config.data.protocol.name,
    }  # fmt: skip
    if is_grid(config):
        raise InputError(
            "config.runs defines a grid, but adapt trains a single run; empty config.runs"
        )
    if not config.objective.name:
        raise InputError(f"objective.name is empty; give one of {', '.join(NEEDS)}")
    for field, value in unused.items():
        if value:
            raise InputError(
                f"{field}={value} has no effect in adapt, which trains on running text; leave it "
                "out"
            )
    if not (config.backbone.path or config.backbone.init):
        raise InputError(
            "backbone.path is empty; give a folder with weights, or a config.json as backbone.init"
        )
    require_corpus(config, held_out=True)


# -- text -------------------------------------------------------------------------------------


def objective_of(config: RunConfig) -> OnText:
    """Returns the objective of a config that `check_objective` has checked."""
    assert isinstance(config.objective, OnText)
    return config.objective


def make_denoising_rows(
    config: RunConfig, corpus: Corpus, objective: DenoisingObjective, tokenizer: Tokenizer
) -> tuple[DenoisingSamples, DenoisingSamples]:
    """Cuts the documents into sequences. Returns those for training and those held out."""
    document_splits = split_held_out(len(corpus), config.corpus.held_out, config.data.seed)
    pad = tokenizer.pad_token_id
    # Padding is masked, so any id will do for a tokenizer without a padding token, e.g. GPT-2's.
    pad = tokenizer.eos_token_id if pad is None else pad
    assert pad is not None
    train, held_out = (
        DenoisingSamples(
            corpus, documents, objective, packed=objective_of(config).packed, pad_id=pad
        )
        for documents in document_splits
    )
    return train, held_out


def make_denoiser(
    config: RunConfig, tokenizer: Tokenizer, backbone: Backbone
) -> DenoisingObjective:
    """Returns the denoiser of an objective. Raises InputError if the tokenizer lacks a token."""
    objective, length = objective_of(config), config.data.max_len
    if isinstance(objective, CausalLM):
        return clm.make(tokenizer, length, separate=objective.separate_documents)
    if isinstance(objective, MaskedLM):
        # The paper replaces every chosen token by the mask; its code leaves 15% as they are.
        masks = (1.0, 0.0) if isinstance(objective, ReplacedTokens) else (0.8, 0.1)
        return mlm.make(
            tokenizer,
            length,
            rate=objective.rate,
            masked=masks[0],
            random=masks[1],
            whole_words=objective.whole_words,
            separate=objective.separate_documents,
        )
    seq2seq_options = dict(
        start=backbone.module.cfg.start,
        pattern=config.backbone.sentinel,
        separate=objective.separate_documents,
    )
    if isinstance(objective, PrefixLM):
        return prefix_lm.make(tokenizer, length, share=objective.share, **seq2seq_options)
    assert isinstance(objective, SpanCorruption)
    return span_corruption.make(
        tokenizer, length, density=objective.rate, span=objective.span, **seq2seq_options
    )


# -- backbone -----------------------------------------------------------------------------------


def open_adaptable(config: RunConfig, placement: Placement) -> Backbone:
    """Opens a backbone, or the config.json of a new one.

    Its weights will be float32, whatever its compute dtype: all of them train.
    """
    style, head = NEEDS[config.objective.name]
    if config.backbone.quantize != "none":
        raise InputError(
            f"backbone.quantize={config.backbone.quantize} is for frozen weights, but adapt "
            "trains all weights; set backbone.quantize=none"
        )
    if config.backbone.init:
        backbone = new_backbone.open_untrained(config.backbone, (head,))
    else:
        backbone = open_backbone(config.backbone)
    # BART was trained to restore whole texts, which no objective does.
    backbone_style = "" if backbone.family == "bart" else backbone.module.STYLE
    if backbone_style != style:
        usable = ", ".join(
            name
            for name, (objective_style, _) in NEEDS.items()
            if objective_style == backbone_style
        )
        raise InputError(
            f"objective.name={config.objective.name} does not work with "
            f"{with_article(backbone.family)}; use {usable or 'a BERT, ELECTRA, GPT-2 or T5'}"
        )
    if head == "rtd" and not config.backbone.init:
        new_backbone.as_electra(backbone)  # raises before the text is read
    max_positions = with_lm_states(backbone.module).dims.max_len
    if config.data.max_len > max_positions:
        raise InputError(
            f"data.max_len={config.data.max_len} exceeds the {max_positions} positions of "
            f"{backbone.folder}; use at most {max_positions}"
        )
    check_mesh(placement, backbone)
    if isinstance(config.objective, ReplacedTokens):
        check_mesh(placement, _open_generator(config, config.objective, backbone), "generator")
    return _in_float32(backbone)


def load_adaptable(config: RunConfig, backbone: Backbone, placement: Placement) -> AdaptableModel:
    """Loads or randomly initialises the weights, and makes the model that trains them."""
    head = NEEDS[config.objective.name][1]
    if config.backbone.init:
        backbone, loaded = new_backbone.random_backbone(backbone, placement, config.seed)
    else:
        backbone, loaded = load_weights(backbone, placement)
        if head == "rtd":
            backbone = new_backbone.as_electra(backbone)
        # A checkpoint without a mask decoder gets none.
        head_names = sorted({head, "mask_decoder"} & {head, *backbone.module.cfg.model_heads})
        backbone, loaded = new_backbone.replace_heads(
            backbone, loaded, head_names, placement, config.seed
        )
    params: dict[str, tree.Params] = {"backbone": loaded.params}
    generator, fingerprint = None, loaded.report.fingerprint
    model: Model | Pair
    if isinstance(config.objective, ReplacedTokens):
        generator, generator_weights = _load_generator(
            config, config.objective, backbone, placement
        )
        params["generator"] = untie_embeddings(generator_weights.params)
        fingerprint = hashlib.sha256(
            f"{fingerprint} {generator_weights.report.fingerprint}".encode()
        ).hexdigest()
        model = make_pair(generator.module, backbone.module)
        objectives = make_objectives(config.objective.weight)
    else:
        module = with_lm_states(backbone.module)
        method, heads = make_prompt("none", module.dims), {"main": TargetHead()}
        model = Model(module, method, heads, last_layer=config.backbone.last_layer, varies=False)
        objectives = [Objective("main", target_loss, sums=count_hits)]
    # All parameters train unless the config says otherwise, unlike in tuning.
    patterns = tuple(config.trainable) or tuple(rf"{part}/.*" for part in params)
    trainable, frozen = tree.split_trainable(params, tree.trainable_mask(params, patterns))
    check_padding(placement, trainable, backbone.module.cfg.vocab)
    trainable = float32_copy(trainable, placement)
    return AdaptableModel(
        backbone, generator, model, objectives, trainable, frozen, loaded.report, fingerprint
    )


def _open_generator(config: RunConfig, objective: ReplacedTokens, backbone: Backbone) -> Backbone:
    """Returns a generator config derived from the discriminator, or opens a trained generator."""
    block = config.backbone  # of the discriminator
    if not objective.generator_path:
        hf = generator_config(
            backbone.hf, width=objective.generator, layers=objective.generator_layers
        )
        block = dataclasses.replace(block, family="electra")
        return _in_float32(backbone_from_config(block, backbone.folder, hf, ("mlm",)))
    generator = open_backbone(
        dataclasses.replace(block, path=objective.generator_path, revision="", family="", init="")
    )
    vocabularies = [
        load_tokenizer(folder).get_vocab() for folder in (generator.folder, backbone.folder)
    ]
    # The discriminator reads the ids that the generator samples.
    if vocabularies[0] != vocabularies[1]:
        raise InputError(
            f"objective.generator_path={objective.generator_path!r} has a different vocabulary "
            f"than {backbone.folder}; use a generator with the same tokenizer"
        )
    if "mlm" not in generator.module.cfg.model_heads:
        raise InputError(
            f"objective.generator_path={objective.generator_path!r} has no masked-LM head; use a "
            "model that `adapt` trained with mlm, or leave it empty for a random generator"
        )
    return _in_float32(generator)


def _in_float32(backbone: Backbone) -> Backbone:
    """Returns a backbone whose weights are loaded as float32, whatever its compute dtype."""
    return backbone._replace(config=dataclasses.replace(backbone.config, dtype="float32"))


def _load_generator(
    config: RunConfig, objective: ReplacedTokens, backbone: Backbone, placement: Placement
) -> tuple[Backbone, Loaded]:
    """Randomly initialises or loads the weights of the generator."""
    generator = _open_generator(config, objective, backbone)
    if not objective.generator_path:
        return new_backbone.random_backbone(generator, placement, config.seed, part="generator")
    generator, loaded = load_weights(generator, placement)
    return new_backbone.replace_heads(
        generator, loaded, ("mlm",), placement, config.seed, part="generator"
    )


def count_adapt_flops(
    adapted: AdaptableModel, like: Batch, rows: int, placement: Placement
) -> float:
    """Counts the model FLOPs of a training step on `rows` sequences like those of a batch.

    They are three times those of the forward pass: the backward pass has two products for each.
    """

    def step_shape(x):
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

    count = make_count_step(without_kernels(adapted.model), adapted.objectives)
    inputs = adapted.trainable, adapted.frozen, jax.tree.map(step_shape, like), jax.random.key(0)
    return 3 * count_flops(with_placement(placement, count), *inputs)


def without_kernels(model: Model | Pair) -> Model | Pair:
    """Returns a model without recomputation and fused kernels; their FLOPs cannot be counted."""
    if isinstance(model, Pair):
        return Pair(_spelt_out(model.generator), _spelt_out(model.discriminator))
    return _spelt_out(model)


def _spelt_out(model: Model) -> Model:
    cfg = dataclasses.replace(model.backbone.cfg, attention="einsum", remat="none")
    return dataclasses.replace(model, backbone=model.backbone.clone(cfg=cfg))


# -- scores ---------------------------------------------------------------------------------------


class ScoredModel(Protocol):
    """Interface of a model whose held-out sequences can be scored."""

    @property
    def model(self) -> Model | Pair:
        """The model."""

    @property
    def objectives(self) -> Sequence[Objective]:
        """The objectives."""

    @property
    def frozen(self) -> tree.Flat:
        """Frozen parameters."""


def feed_rows(
    config: RunConfig,
    rows: SampleSource,
    placement: Placement,
    score: Callable[[Sums], dict[str, float]],
    flops: float,
) -> Feed:
    """Returns the training batches of running text, with scores and throughput for the log.

    `flops` are the model FLOPs of a step on all devices together.
    """
    visits = ShuffledBatches(
        rows, batch=config.data.batch, seed=config.seed, share=placement.batch_part()
    )
    meter = Meter(visits, score, flops, config.backbone.dtype, placement)
    return Feed(visits, meter.next_batch, meter.describe)


def held_out_value(scores: dict[str, float]) -> float:
    """Returns the negative held-out loss: higher is better."""
    return -scores["loss"]


def score_sums(sums: Sums) -> dict[str, float]:
    """Computes scores from the sums of objectives."""
    if "main" in sums:
        return metrics.score_targets(sums["main"])
    scores = metrics.score_detection(sums["discriminator"])
    generator_scores = metrics.score_targets(sums["generator"])
    return scores | {f"generator_{name}": value for name, value in generator_scores.items()}


def make_held_out_scorer(
    placement: Placement,
    trainable_model: ScoredModel,
    held_out: EvalBatches,
    seed: int,
    score: Callable[[Sums], dict[str, float]] = score_sums,
) -> Callable[[tree.Flat], dict[str, float]]:
    """Returns a function (trainable) -> held-out scores, with the same masks in every pass."""
    count = make_count_step(trainable_model.model, trainable_model.objectives)
    step = jit(with_placement(placement, count), out_shardings=placement.replicated)
    key = rng.key_for(seed, "held out")

    def measure(trainable: tree.Flat) -> dict[str, float]:
        total: dict[str, dict[str, np.float64]] = {}
        batch_sums = (
            step(
                trainable,
                trainable_model.frozen,
                put_batch(placement, batch),
                jax.random.fold_in(key, number),
            )
            for number, batch in enumerate(held_out)
        )
        for sums in dispatch_ahead(batch_sums):
            # In float64 on the host, because float32 counts stop growing at 2^24.
            def add(old, new):
                return old + np.float64(new)

            sums = jax.device_get(sums)
            total = jax.tree.map(add, total, sums) if total else jax.tree.map(np.float64, sums)
        return score(total)

    return measure


def render_predictions(
    config: RunConfig,
    placement: Placement,
    adapted: AdaptableModel,
    trainable: tree.Flat,
    held_out: DenoisingSamples,
    tokenizer: Tokenizer,
) -> str:
    """Returns the model's predictions on some held-out sequences as text."""
    data_shards = placement.mesh.shape[DATA]
    # The data axis must divide the batch; the additional rows are padding.
    examples = objective_of(config).examples
    batch_size = -(-examples // data_shards) * data_shards
    options = dict(batch=batch_size, seed=config.data.seed, limit=examples)
    local_batch = next(iter(EvalBatches(held_out, share=placement.batch_part(), **options)))
    step = jax.jit(
        with_placement(placement, make_fill_step(adapted.model)), out_shardings=placement.replicated
    )
    key = rng.key_for(config.seed, "held out")
    predictions = step(trainable, adapted.frozen, put_batch(placement, local_batch), key)
    # Again without `share`, because the report shows the rows of all processes.
    global_batch = next(iter(EvalBatches(held_out, **options)))
    return (
        "\n\n".join(
            render(config.objective.name, tokenizer, global_batch, *jax.device_get(predictions))
        )
        + "\n"
    )


# -- stages ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PreparedBackbone(Prepared[AdaptationRecord]):
    """Sequences of a corpus, and the backbone that trains on them."""

    tokenizer: Tokenizer
    folder: Path  # of the backbone
    corpus: Corpus
    rows: DenoisingSamples  # for training
    held_out: DenoisingSamples
    dev: EvalBatches  # over the held-out rows
    adapted: AdaptableModel


class AdaptStages(RunStages[AdaptationRecord, PreparedBackbone, Job]):
    """Trains on documents of a corpus, evaluates on held-out ones, and writes a backbone."""

    DONE, RECORD = "adapted", AdaptationRecord

    def check(self) -> None:
        """Checks the config."""
        check_config(self.config)
        check_objective(self.config)

    def prepare(self, saved: AdaptationRecord | None, resume_step: int | None) -> PreparedBackbone:
        """Indexes the corpus if needed, and loads or randomly initialises the backbone."""
        config, placement = self.config, build_placement(self.config)
        backbone = open_adaptable(config, placement)
        tokenizer = load_tokenizer(backbone.folder)
        denoiser = make_denoiser(config, tokenizer, backbone)
        vocab = backbone.module.cfg.vocab
        corpus = open_corpus(config, tokenizer, vocab, self.workdir, resume_step)
        if saved is not None:
            # Before batches are planned: in other text the saved position means other sequences.
            check_unchanged(saved.corpus, corpus.fingerprint)
        rows, held_out = make_denoising_rows(config, corpus, denoiser, tokenizer)
        dev = EvalBatches(
            held_out,
            batch=config.data.eval_batch,
            seed=config.data.seed,
            limit=config.corpus.dev_rows,
            share=placement.batch_part(),
        )
        steps_per_epoch = -(-len(rows) // config.data.batch)
        milestones = config_milestones(config, steps_per_epoch, len(rows))
        adapted = load_adaptable(config, backbone, placement)
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
        return make_held_out_scorer(placement, prepared.adapted, prepared.dev, seed)

    def build(self, prepared: PreparedBackbone) -> Job:
        """Makes the step, and counts its FLOPs."""
        config, placement, adapted = self.config, prepared.placement, prepared.adapted
        tx, state = init_train_state(config, prepared, adapted.trainable)
        flops = count_adapt_flops(adapted, next(iter(prepared.dev)), config.data.batch, placement)
        accumulate = config.optim.accumulate
        return Job(
            step=make_train_step(adapted.model, tx, adapted.objectives, accumulate=accumulate),
            state=state,
            frozen=adapted.frozen,
            feed=functools.partial(feed_rows, config, prepared.rows, placement, score_sums, flops),
            measure=self.build_scores(prepared),
            metric="loss",
            value=held_out_value,
            has_dropout=config.backbone.may_drop,
        )

    def lines(self, prepared: PreparedBackbone, job: Job, start_message: str) -> Iterator[str]:
        """Yields log lines: what was read, what trains, and what is randomly initialised."""
        config, corpus, adapted = self.config, prepared.corpus, prepared.adapted
        source, report = config.backbone.init or config.backbone.path, adapted.report
        yield f"backbone {source} ({adapted.backbone.family}), weights {report.fingerprint[:12]}"
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
        if objective_of(config).examples:
            # All processes predict, because the step runs on all devices; the first writes.
            text = render_predictions(
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
