"""From a config to a run that goes on with a backbone's own pre-training."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt import metrics, rng, tree
from jaxprompt.convert import folder, fresh, load
from jaxprompt.data.corpus import Corpus, TextSettings, check_vocabulary, divide, index_corpus
from jaxprompt.data.denoise import clm, mlm, prefix_lm, rtd, span_corruption
from jaxprompt.data.denoise.batches import Pass, Rows
from jaxprompt.errors import InputError
from jaxprompt.heads.pretraining import TargetHead
from jaxprompt.losses import count_hits, on_targets
from jaxprompt.model import Model
from jaxprompt.pretraining import generator_config, make_objectives, make_pair, untie
from jaxprompt.prompts import make_prompt
from jaxprompt.scorer import Backbone, open_backbone, shape_backbone
from jaxprompt.sharding import Placement, put_batch, within
from jaxprompt.steps import Objective, make_count_step
from jaxprompt.types import Batch

# What an objective asks of a backbone: its style, and the head that must be there or is drawn.
NEEDS = {
    "mlm": ("masked", "mlm"), "rtd": ("masked", "rtd"), "clm": ("causal", "lm"),
    "prefix_lm": ("seq2seq", "lm"), "span_corruption": ("seq2seq", "lm"),
}  # fmt: skip
_HEADS = ("pooler", "mlm", "rtd", "lm")


class Adapted(NamedTuple):
    """A backbone, what it is pre-trained by, and its numbers before the first step."""

    backbone: Backbone
    generator: Backbone | None  # rtd
    model: Any  # a Model, or a Pair
    objectives: list[Objective]
    trainable: tree.Flat  # float32
    frozen: tree.Flat
    report: load.Report
    fresh: tuple[str, ...]  # heads that were drawn


def check_objective(c: Any) -> None:
    """Raises InputError where a config lacks what only `adapt` needs."""
    for block, name, cure in (
        ("objective", "name", f"give one of {', '.join(NEEDS)}"),
        ("corpus", "path", "give a folder, a file or a glob of text, hub:ID or tfds:NAME"),
        ("backbone", "path", "give a folder with weights, or with a tokenizer for backbone.init"),
    ):
        if not c[block][name]:
            raise InputError(f"{block}.{name} is empty; {cure}")
    if not c.corpus.held_out:
        raise InputError("corpus.held_out=0 leaves no document to score; give a share above 0")


# -- text -------------------------------------------------------------------------------------


def read_corpus(
    c: Any, tokenizer: Any, vocab: int, workdir: str, say: Callable[[str], None]
) -> Corpus:
    """Opens the indexed text of a config; indexes it where that was not done yet."""
    check_vocabulary(tokenizer, vocab)
    own = {field.name: c.corpus[field.name] for field in dataclasses.fields(TextSettings)}
    return index_corpus(
        c.corpus.path, tokenizer, c.corpus.store or Path(workdir) / "corpus", TextSettings(**own),
        processes=c.corpus.processes, cache_dir=c.data.cache_dir or None, report=say,
    )  # fmt: skip


def read_rows(c: Any, corpus: Corpus, objective: Any, tokenizer: Any) -> tuple[Rows, Rows]:
    """Cuts the documents into rows. -> those to train on, those of held-out documents"""
    shares = divide(len(corpus), c.corpus.held_out, c.data.seed)
    pad = tokenizer.pad_token_id
    pad = tokenizer.eos_token_id if pad is None else pad
    train, held = (
        Rows(corpus, share, objective, packed=c.objective.packed, pad_id=pad) for share in shares
    )
    return train, held


def make_denoiser(c: Any, tokenizer: Any, hf: Mapping[str, Any]) -> Any:
    """Makes what turns text into rows. Raises InputError where the tokenizer lacks a token."""
    o, length = c.objective, c.data.max_len
    if o.name == "clm":
        return clm.make(tokenizer, length, apart=o.apart)
    if o.name in ("mlm", "rtd"):
        make = {"mlm": mlm.make, "rtd": rtd.make}[o.name]
        return make(tokenizer, length, rate=o.rate, whole_words=o.whole_words, apart=o.apart)
    given = dict(start=hf["decoder_start_token_id"], pattern=c.backbone.sentinel, apart=o.apart)
    if o.name == "prefix_lm":
        return prefix_lm.make(tokenizer, length, share=o.share, **given)
    return span_corruption.make(tokenizer, length, density=o.rate, span=o.span, **given)


# -- backbone -----------------------------------------------------------------------------------


def open_adaptable(c: Any) -> Backbone:
    """Opens a backbone, or the config.json of one to be drawn, with the head that is trained."""
    style, head = NEEDS[c.objective.name]
    block = c.backbone.to_dict()
    if c.backbone.init:
        where = folder.resolve(c.backbone.path)
        hf = folder.read_json(Path(c.backbone.init), "a transformers config")
        backbone = shape_backbone(block, where, hf, (head,))
    else:
        backbone = open_backbone(block)
    if backbone.module.STYLE != style:
        known = ", ".join(n for n, (own, _) in NEEDS.items() if own == backbone.module.STYLE)
        raise InputError(
            f"objective.name={c.objective.name} is not for {backbone.family}; take {known}"
        )
    family, hf = backbone.family, dict(backbone.hf)
    if head == "rtd" and family == "bert":  # the same trunk, under ELECTRA's names
        family = "electra"
        hf |= {"model_type": family, "embedding_size": hf["hidden_size"]}
    present = set() if c.backbone.init else set(backbone.module.cfg.model_heads)
    keeps = present - {"pooler"} if family != backbone.family else present
    return shape_backbone(block | {"family": family}, backbone.folder, hf, sorted(keeps | {head}))


def load_adaptable(c: Any, backbone: Backbone, placement: Placement) -> Adapted:
    """Reads or draws the weights, and makes the model that pre-trains them."""
    loaded, backbone = _read(c, backbone, placement)
    params = {"backbone": loaded.params}
    generator = None
    if c.objective.name == "rtd":
        o = c.objective
        hf = generator_config(backbone.hf, width=o.generator, layers=o.generator_layers)
        generator = shape_backbone(backbone.block, backbone.folder, hf, ("mlm",))
        drawn = fresh.draw_backbone(
            "electra", hf, ("mlm",), seed=c.seed, placement=placement, part="generator",
            dtype=c.backbone.dtype,
        )  # fmt: skip
        generator = _fit(generator, drawn, placement)
        model = make_pair(generator.module, backbone.module)
        params["generator"] = untie(drawn.params)
        objectives = make_objectives(o.weight)
    else:
        module = backbone.module
        model = Model(module, make_prompt("none", module.dims), {"main": TargetHead()})
        objectives = [Objective("main", on_targets, sums=count_hits)]
    patterns = tuple(c.trainable) or _patterns(c.objective.name, params)
    trainable, frozen = tree.split(params, tree.trainable_mask(params, patterns))
    # Copied: a step takes the state's buffers over.
    copy = lambda flat: jax.tree.map(jnp.copy, tree.cast(flat, jnp.float32))
    trainable = jax.jit(copy, out_shardings=placement.parameters(trainable))(trainable)
    return Adapted(
        backbone, generator, model, objectives, trainable, frozen, loaded.report,
        loaded.report.fresh,
    )  # fmt: skip


def _read(c: Any, backbone: Backbone, placement: Placement) -> tuple[load.Loaded, Backbone]:
    heads = tuple(sorted(backbone.module.cfg.model_heads))
    given = dict(seed=c.seed, placement=placement, dtype=c.backbone.dtype)
    given |= {"rescale": c.backbone.rescale}
    if c.backbone.init:
        loaded = fresh.draw_backbone(backbone.family, backbone.hf, heads, **given)
        return loaded, _fit(backbone, loaded, placement)
    family, hf = backbone.family, folder.read_config(backbone.folder)
    loaded = load.load_backbone(
        backbone.folder, hf["model_type"] if c.backbone.family == "" else c.backbone.family, hf,
        dtype=c.backbone.dtype, rescale=c.backbone.rescale, placement=placement,
    )  # fmt: skip
    loaded = fresh.with_heads(loaded, family, backbone.hf, heads, **given)
    return loaded, _fit(backbone, loaded, placement)


def _fit(backbone: Backbone, loaded: load.Loaded, placement: Placement) -> Backbone:
    cfg = backbone.module.cfg
    rows, tied = placement.padded(cfg.vocab), cfg.tied and loaded.report.tied
    cfg = dataclasses.replace(cfg, rows=rows, tied=tied)
    return backbone._replace(module=backbone.module.clone(cfg=cfg))


def _patterns(objective: str, params: Mapping[str, Any]) -> tuple[str, ...]:
    """All trains but the heads that the objective does not use."""
    used = NEEDS[objective][1]
    idle = [head for head in _HEADS if head in params["backbone"] and head != used]
    but = f"(?!(?:{'|'.join(map(re.escape, idle))})/)" if idle else ""
    return (rf"backbone/{but}.*", *([r"generator/.*"] * ("generator" in params)))


# -- scores ---------------------------------------------------------------------------------------


def build_scores(
    placement: Placement, adapted: Adapted, held: Pass, seed: int
) -> Callable[[tree.Flat], dict[str, float]]:
    """Makes trainable -> the scores of held-out rows, with the same draws in every pass."""
    count = make_count_step(adapted.model, adapted.objectives)
    step = jax.jit(within(placement, count), out_shardings=placement.replicated)
    key = rng.key_for(seed, "held out")

    def measure(trainable: tree.Flat) -> dict[str, float]:
        total: dict[str, dict[str, np.float64]] = {}
        for number, batch in enumerate(held):
            own = step(
                trainable, adapted.frozen, put_batch(placement, batch),
                jax.random.fold_in(key, number),
            )  # fmt: skip
            add = lambda old, new: old + np.float64(new)
            own = jax.device_get(own)
            total = jax.tree.map(add, total, own) if total else jax.tree.map(np.float64, own)
        return score_sums(total)

    return measure


def score_sums(sums: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Turns the sums of objectives into scores."""
    if "main" in sums:
        return metrics.score_targets(sums["main"])
    found = metrics.score_detection(sums["discriminator"])
    other = metrics.score_targets(sums["generator"])
    return found | {f"generator_{name}": value for name, value in other.items()}


def tokens_of(batches: Iterable[Batch]) -> int:
    """Counts the tokens of batches, padding aside."""
    return sum(int(batch.encoder.mask.sum()) for batch in batches)
