"""Builds a run that continues the pre-training of a backbone from its config."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt import rng, tree
from jaxprompt.backbones import for_words
from jaxprompt.build import new_backbone
from jaxprompt.build.backbone import load_weights, open_backbone, shape_backbone
from jaxprompt.build.corpus import need_corpus
from jaxprompt.build.placement import check_mesh
from jaxprompt.config.run import (
    CausalLM,
    MaskedLM,
    OnText,
    PrefixLM,
    ReplacedTokens,
    RunConfig,
    SpanCorruption,
)
from jaxprompt.convert.load import Loaded, Report
from jaxprompt.corpus import Corpus, divide
from jaxprompt.corpus.denoise import clm, mlm, prefix_lm, rtd, span_corruption
from jaxprompt.corpus.denoise.batches import DenoisingRows, Pass, Rows, Visits
from jaxprompt.corpus.denoise.rows import Objective as Denoiser
from jaxprompt.data.text.tokenizer import Tokenizer, load_tokenizer
from jaxprompt.errors import InputError, with_article
from jaxprompt.heads.pretraining import TargetHead
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Backbone
from jaxprompt.parallel.compilation import jit
from jaxprompt.parallel.flops import count_flops
from jaxprompt.parallel.sharding import DATA, Placement, check_padding, put_batch, within
from jaxprompt.prompts import make_prompt
from jaxprompt.runs.fill_report import make_fill_step, render
from jaxprompt.runs.grid.expand import is_grid
from jaxprompt.runs.replaced_tokens import Pair, generator_config, make_objectives, make_pair, untie
from jaxprompt.scoring import metrics
from jaxprompt.scoring.losses import count_hits, target_loss
from jaxprompt.training.evaluation import ahead
from jaxprompt.training.one_run import Feed
from jaxprompt.training.steps import make_count_step
from jaxprompt.training.throughput import Meter
from jaxprompt.types import Batch, Objective

# What an objective asks of a backbone: its style, and the head that must be there or is drawn.
NEEDS = {
    "mlm": ("masked", "mlm"), "rtd": ("masked", "rtd"), "clm": ("causal", "lm"),
    "prefix_lm": ("seq2seq", "lm"), "span_corruption": ("seq2seq", "lm"),
}  # fmt: skip

Sums = Mapping[str, Mapping[str, float]]  # objective -> what it counts


class Adapted(NamedTuple):
    """A backbone, its pre-training objectives, and its initial parameters."""

    backbone: Backbone
    generator: Backbone | None  # rtd
    model: Model | Pair
    objectives: list[Objective]
    trainable: tree.Flat  # float32
    frozen: tree.Flat
    report: Report
    fingerprint: str  # of all weights that it starts from


def check_objective(config: RunConfig) -> None:
    """Raises InputError if a config cannot be used with `adapt`."""
    if is_grid(config):
        raise InputError("adapt takes one run, but config.runs defines a grid; empty it")
    if not config.objective.name:
        raise InputError(f"objective.name is empty; give one of {', '.join(NEEDS)}")
    need_corpus(config)
    idle = {
        "optim.label_smoothing": config.optim.label_smoothing,
        "cache.location": config.cache.location,
        "train.init_head": config.train.init_head, "data.protocol": config.data.protocol.name,
    }  # fmt: skip
    for field, value in idle.items():
        if value:
            raise InputError(
                f"{field}={value} has no effect in adapt, which trains on running text; leave it "
                "out"
            )
    if not (config.backbone.path or config.backbone.init):
        raise InputError(
            "backbone.path is empty; give a folder with weights, or a config.json as backbone.init"
        )
    if not config.corpus.held_out:
        raise InputError("corpus.held_out=0 leaves no document to evaluate on; use a share above 0")


# -- text -------------------------------------------------------------------------------------


def objective_of(config: RunConfig) -> OnText:
    """Returns the objective of a config that `check_objective` has checked."""
    assert isinstance(config.objective, OnText)
    return config.objective


def read_rows(
    config: RunConfig, corpus: Corpus, objective: Denoiser, tokenizer: Tokenizer
) -> tuple[DenoisingRows, DenoisingRows]:
    """Cuts the documents into sequences. Returns those for training and those held out."""
    shares = divide(len(corpus), config.corpus.held_out, config.data.seed)
    pad = tokenizer.pad_token_id
    # Padding is masked, so any id will do where a tokenizer has none, as GPT-2's.
    pad = tokenizer.eos_token_id if pad is None else pad
    assert pad is not None
    train, held = (
        DenoisingRows(corpus, share, objective, packed=objective_of(config).packed, pad_id=pad)
        for share in shares
    )
    return train, held


def make_denoiser(config: RunConfig, tokenizer: Tokenizer, backbone: Backbone) -> Denoiser:
    """Returns the denoiser of an objective. Raises InputError if the tokenizer lacks a token."""
    objective, length = objective_of(config), config.data.max_len
    if isinstance(objective, CausalLM):
        return clm.make(tokenizer, length, apart=objective.separate_documents)
    if isinstance(objective, MaskedLM):
        make = rtd.make if isinstance(objective, ReplacedTokens) else mlm.make
        return make(
            tokenizer, length, rate=objective.rate, whole_words=objective.whole_words,
            apart=objective.separate_documents,
        )  # fmt: skip
    of_t5 = dict(
        start=backbone.module.cfg.start, pattern=config.backbone.sentinel,
        apart=objective.separate_documents,
    )  # fmt: skip
    if isinstance(objective, PrefixLM):
        return prefix_lm.make(tokenizer, length, share=objective.share, **of_t5)
    assert isinstance(objective, SpanCorruption)
    return span_corruption.make(
        tokenizer, length, density=objective.rate, span=objective.span, **of_t5
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
        backbone = new_backbone.open_config(config.backbone, (head,))
    else:
        backbone = open_backbone(config.backbone)
    if backbone.module.STYLE != style:
        known = ", ".join(n for n, (own, _) in NEEDS.items() if own == backbone.module.STYLE)
        raise InputError(
            f"objective.name={config.objective.name} does not work with "
            f"{with_article(backbone.family)}; use {known or 'a BERT, ELECTRA, GPT-2 or T5'}"
        )
    if head == "rtd" and not config.backbone.init:
        new_backbone.as_electra(backbone)  # says so before the text is read
    most = for_words(backbone.module).dims.max_len
    if config.data.max_len > most:
        raise InputError(
            f"data.max_len={config.data.max_len} exceeds the {most} positions of "
            f"{backbone.folder}; use at most {most}"
        )
    check_mesh(placement, backbone)
    if head == "rtd":
        check_mesh(placement, _open_generator(config, backbone), "generator")
    return _in_float32(backbone)


def load_adaptable(config: RunConfig, backbone: Backbone, placement: Placement) -> Adapted:
    """Loads or randomly initialises the weights, and makes the model that trains them."""
    head = NEEDS[config.objective.name][1]
    if config.backbone.init:
        backbone, loaded = new_backbone.draw_weights(backbone, placement, config.seed)
    else:
        backbone, loaded = load_weights(backbone, placement)
        if head == "rtd":
            backbone = new_backbone.as_electra(backbone)
        # A checkpoint without a mask decoder gets none.
        own = sorted({head, "mask_decoder"} & {head, *backbone.module.cfg.model_heads})
        backbone, loaded = new_backbone.with_heads(backbone, loaded, own, placement, config.seed)
    params: dict[str, tree.Params] = {"backbone": loaded.params}
    generator, mark = None, loaded.report.fingerprint
    model: Model | Pair
    if isinstance(config.objective, ReplacedTokens):
        generator, drawn = _load_generator(config, backbone, placement)
        params["generator"] = untie(drawn.params)
        mark = hashlib.sha256(f"{mark} {drawn.report.fingerprint}".encode()).hexdigest()
        model = make_pair(generator.module, backbone.module)
        objectives = make_objectives(_replaced_tokens(config).weight)
    else:
        module = for_words(backbone.module)
        method, heads = make_prompt("none", module.dims), {"main": TargetHead()}
        model = Model(module, method, heads, last_layer=config.backbone.last_layer, varies=False)
        objectives = [Objective("main", target_loss, sums=count_hits)]
    # All of it trains unless the config says otherwise, unlike in tuning.
    patterns = tuple(config.trainable) or tuple(rf"{part}/.*" for part in params)
    trainable, frozen = tree.split_trainable(params, tree.trainable_mask(params, patterns))
    check_padding(placement, trainable, backbone.module.cfg.vocab)
    # Copied: a step takes the state's buffers over.
    copy = lambda flat: jax.tree.map(jnp.copy, tree.cast(flat, jnp.float32))
    trainable = jax.jit(copy, out_shardings=placement.parameters(trainable))(trainable)
    return Adapted(backbone, generator, model, objectives, trainable, frozen, loaded.report, mark)


def _open_generator(config: RunConfig, backbone: Backbone) -> Backbone:
    """Returns a generator config derived from the discriminator, or opens a trained generator."""
    objective, block = _replaced_tokens(config), config.backbone  # it computes like the other
    if not objective.generator_path:
        hf = generator_config(
            backbone.hf, width=objective.generator, layers=objective.generator_layers
        )
        block = dataclasses.replace(block, family="electra")
        return _in_float32(shape_backbone(block, backbone.folder, hf, ("mlm",)))
    opened = open_backbone(
        dataclasses.replace(block, path=objective.generator_path, revision="", family="", init="")
    )
    words = [load_tokenizer(folder).get_vocab() for folder in (opened.folder, backbone.folder)]
    # What the generator draws is fed to the discriminator by its id.
    if words[0] != words[1]:
        raise InputError(
            f"objective.generator_path={objective.generator_path!r} has a different vocabulary "
            f"than {backbone.folder}; use a generator with the same tokenizer"
        )
    if "mlm" not in opened.module.cfg.model_heads:
        raise InputError(
            f"objective.generator_path={objective.generator_path!r} has no masked-LM head; use a "
            "model that `adapt` trained with mlm, or leave it empty for a random generator"
        )
    return _in_float32(opened)


def _replaced_tokens(config: RunConfig) -> ReplacedTokens:
    assert isinstance(config.objective, ReplacedTokens)
    return config.objective


def _in_float32(backbone: Backbone) -> Backbone:
    """Returns a backbone whose weights are loaded as float32, whatever its compute dtype."""
    return backbone._replace(config=dataclasses.replace(backbone.config, dtype="float32"))


def _load_generator(
    config: RunConfig, backbone: Backbone, placement: Placement
) -> tuple[Backbone, Loaded]:
    """Randomly initialises or loads the weights of the generator."""
    opened = _open_generator(config, backbone)
    if not _replaced_tokens(config).generator_path:
        return new_backbone.draw_weights(opened, placement, config.seed, part="generator")
    opened, loaded = load_weights(opened, placement)
    return new_backbone.with_heads(
        opened, loaded, ("mlm",), placement, config.seed, part="generator"
    )


def flops_of(adapted: Adapted, like: Batch, rows: int, placement: Placement) -> float:
    """Counts the model FLOPs of a training step on `rows` sequences like those of a batch.

    They are three times those of the forward pass: the backward pass has two products for each.
    """
    shape = lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
    count = make_count_step(spelt_out(adapted.model), adapted.objectives)
    given = adapted.trainable, adapted.frozen, jax.tree.map(shape, like), jax.random.key(0)
    return 3 * count_flops(within(placement, count), *given)


def spelt_out(model: Model | Pair) -> Model | Pair:
    """Returns a model without fused kernels, whose FLOPs cannot be counted, and recomputation."""
    if isinstance(model, Pair):
        return Pair(_spelt_out(model.generator), _spelt_out(model.discriminator))
    return _spelt_out(model)


def _spelt_out(model: Model) -> Model:
    cfg = dataclasses.replace(model.backbone.cfg, attention="einsum", remat="none")
    return dataclasses.replace(model, backbone=model.backbone.clone(cfg=cfg))


# -- scores ---------------------------------------------------------------------------------------


class Learned(Protocol):
    """Interface of what is needed to score held-out sequences."""

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
    config: RunConfig, rows: Rows, placement: Placement,
    score: Callable[[Sums], dict[str, float]], flops: float,
) -> Feed:  # fmt: skip
    """Returns the training batches of running text, with scores and throughput for the log.

    `flops` are the model FLOPs of a step on all devices together.
    """
    visits = Visits(rows, batch=config.data.batch, seed=config.seed, share=placement.share())
    meter = Meter(visits, score, flops, config.backbone.dtype, placement)
    return Feed(visits, meter.take, meter.describe)


def held_out_value(scores: dict[str, float]) -> float:
    """Returns the negative held-out loss: higher is better."""
    return -scores["loss"]


def score_sums(sums: Sums) -> dict[str, float]:
    """Computes scores from the sums of objectives."""
    if "main" in sums:
        return metrics.score_targets(sums["main"])
    found = metrics.score_detection(sums["discriminator"])
    other = metrics.score_targets(sums["generator"])
    return found | {f"generator_{name}": value for name, value in other.items()}


def build_scores(
    placement: Placement, learned: Learned, held: Pass, seed: int,
    score: Callable[[Sums], dict[str, float]] = score_sums,
) -> Callable[[tree.Flat], dict[str, float]]:  # fmt: skip
    """Returns a function trainable -> held-out scores, with the same random masks in every pass."""
    count = make_count_step(learned.model, learned.objectives)
    step = jit(within(placement, count), out_shardings=placement.replicated)
    key = rng.key_for(seed, "held out")

    def measure(trainable: tree.Flat) -> dict[str, float]:
        total: dict[str, dict[str, np.float64]] = {}
        found = (
            step(
                trainable, learned.frozen, put_batch(placement, batch),
                jax.random.fold_in(key, number),
            )
            for number, batch in enumerate(held)
        )  # fmt: skip
        for own in ahead(found):
            # In float64, on the host: in float32 counts beyond 2^24 would stop growing.
            add = lambda old, new: old + np.float64(new)
            own = jax.device_get(own)
            total = jax.tree.map(add, total, own) if total else jax.tree.map(np.float64, own)
        return score(total)

    return measure


def fill(
    config: RunConfig,
    placement: Placement,
    adapted: Adapted,
    trainable: tree.Flat,
    held: DenoisingRows,
    tokenizer: Tokenizer,
) -> str:
    """Returns the model's predictions on some held-out sequences as text."""
    devices = placement.mesh.shape[DATA]
    # A batch must divide over the devices; the rows beyond are filling.
    examples = objective_of(config).examples
    size = -(-examples // devices) * devices
    given = dict(batch=size, seed=config.data.seed, limit=examples)
    own = next(iter(Pass(held, share=placement.share(), **given)))
    step = jax.jit(
        within(placement, make_fill_step(adapted.model)), out_shardings=placement.replicated
    )
    key = rng.key_for(config.seed, "held out")
    found = step(trainable, adapted.frozen, put_batch(placement, own), key)
    # Once more without `share`, because the report shows the rows of all processes.
    whole = next(iter(Pass(held, **given)))
    return (
        "\n\n".join(render(config.objective.name, tokenizer, whole, *jax.device_get(found))) + "\n"
    )
