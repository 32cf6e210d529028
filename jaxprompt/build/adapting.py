"""From a config to a run that goes on with a backbone's own pre-training."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt import initial, metrics, rng, tree
from jaxprompt.convert.load import Report
from jaxprompt.data.corpus import Corpus, TextSettings, check_vocabulary, divide, index_corpus
from jaxprompt.data.denoise import clm, mlm, prefix_lm, rtd, span_corruption
from jaxprompt.data.denoise.batches import Pass, Rows
from jaxprompt.errors import InputError
from jaxprompt.heads.pretraining import TargetHead
from jaxprompt.losses import count_hits, on_targets
from jaxprompt.model import Model
from jaxprompt.pretraining import generator_config, make_objectives, make_pair, untie
from jaxprompt.prompts import make_prompt
from jaxprompt.scorer import Backbone, load_weights, open_backbone, shape_backbone
from jaxprompt.sharding import Placement, put_batch, within
from jaxprompt.steps import Objective, make_count_step
from jaxprompt.types import Batch

# What an objective asks of a backbone: its style, and the head that must be there or is drawn.
NEEDS = {
    "mlm": ("masked", "mlm"), "rtd": ("masked", "rtd"), "clm": ("causal", "lm"),
    "prefix_lm": ("seq2seq", "lm"), "span_corruption": ("seq2seq", "lm"),
}  # fmt: skip


class Adapted(NamedTuple):
    """A backbone, what it is pre-trained by, and its numbers before the first step."""

    backbone: Backbone
    generator: Backbone | None  # rtd
    model: Any  # a Model, or a Pair
    objectives: list[Objective]
    trainable: tree.Flat  # float32
    frozen: tree.Flat
    report: Report


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


def make_denoiser(c: Any, tokenizer: Any, backbone: Backbone) -> Any:
    """Makes what turns text into rows. Raises InputError where the tokenizer lacks a token."""
    o, length = c.objective, c.data.max_len
    if o.name == "clm":
        return clm.make(tokenizer, length, apart=o.apart)
    if o.name in ("mlm", "rtd"):
        make = {"mlm": mlm.make, "rtd": rtd.make}[o.name]
        return make(tokenizer, length, rate=o.rate, whole_words=o.whole_words, apart=o.apart)
    given = dict(start=backbone.module.cfg.start, pattern=c.backbone.sentinel, apart=o.apart)
    if o.name == "prefix_lm":
        return prefix_lm.make(tokenizer, length, share=o.share, **given)
    return span_corruption.make(tokenizer, length, density=o.rate, span=o.span, **given)


# -- backbone -----------------------------------------------------------------------------------


def open_adaptable(c: Any) -> Backbone:
    """Opens a backbone, or the config.json of one to be drawn.

    Its weights will be float32, whatever it computes in: all of them train.
    """
    style, head = NEEDS[c.objective.name]
    block = c.backbone.to_dict()
    backbone = initial.open_config(block, (head,)) if block["init"] else open_backbone(block)
    if backbone.module.STYLE != style:
        known = ", ".join(n for n, (own, _) in NEEDS.items() if own == backbone.module.STYLE)
        raise InputError(
            f"objective.name={c.objective.name} is not for a {backbone.family}; take {known}"
        )
    return backbone._replace(block=block | {"dtype": "float32"})


def load_adaptable(c: Any, backbone: Backbone, placement: Placement) -> Adapted:
    """Reads or draws the weights, and makes the model that pre-trains them."""
    head = NEEDS[c.objective.name][1]
    if c.backbone.init:
        backbone, loaded = initial.draw_weights(backbone, placement, c.seed)
    else:
        backbone, loaded = load_weights(backbone, placement)
        if head == "rtd":
            backbone = initial.as_electra(backbone)
        backbone, loaded = initial.with_heads(backbone, loaded, (head,), placement, c.seed)
    params, generator = {"backbone": loaded.params}, None
    if head == "rtd":
        o = c.objective
        hf = generator_config(backbone.hf, width=o.generator, layers=o.generator_layers)
        # Its module computes like the discriminator's.
        block = c.backbone.to_dict() | {"family": "electra"}
        generator = shape_backbone(block, backbone.folder, hf, ("mlm",))
        generator = generator._replace(block=block | {"dtype": "float32"})
        generator, drawn = initial.draw_weights(generator, placement, c.seed, part="generator")
        params["generator"] = untie(drawn.params)
        model, objectives = make_pair(generator.module, backbone.module), make_objectives(o.weight)
    else:
        module = backbone.module
        model = Model(module, make_prompt("none", module.dims), {"main": TargetHead()})
        objectives = [Objective("main", on_targets, sums=count_hits)]
    patterns = tuple(c.trainable) or tuple(rf"{part}/.*" for part in params)
    trainable, frozen = tree.split(params, tree.trainable_mask(params, patterns))
    # Copied: a step takes the state's buffers over.
    copy = lambda flat: jax.tree.map(jnp.copy, tree.cast(flat, jnp.float32))
    trainable = jax.jit(copy, out_shardings=placement.parameters(trainable))(trainable)
    return Adapted(backbone, generator, model, objectives, trainable, frozen, loaded.report)


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
