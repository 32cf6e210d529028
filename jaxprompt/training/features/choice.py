"""Chooses the states to cache: the highest ones that do not depend on trainable parameters."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprompt import tree
from jaxprompt.config.run import RunConfig
from jaxprompt.data.text.encoded import Split
from jaxprompt.errors import InputError
from jaxprompt.models.model import Model
from jaxprompt.models.scorer import Scorer
from jaxprompt.types import Batch

OFF = "or set cache.location=''"
# Parts of a backbone that stand above all its layers, by what is kept: their numbers may train.
_HEADS = ("pooler", "mlm", "rtd", "lm")
_BELOW = ("embed", "layers", "bias", "relative", "conv", "later_layers")


class What(NamedTuple):
    """Which states are cached."""

    layer: int | None  # those that enter this layer of the input's stack; None = the output
    all_tokens: bool  # of every token; else of the positions that the head reads

    def __str__(self) -> str:
        tokens = "every token" if self.all_tokens else "the positions that the head reads"
        if self.layer is None:
            return f"the backbone's output at {tokens}"
        return f"what layers 1-{self.layer} give for {tokens}"


def choose(config: RunConfig, scorer: Scorer, train: Split, weights: Any) -> What:
    """Returns the highest states that depend on no trainable parameter and no dropout.

    Raises InputError if there are none.
    """
    where = f"cache.location={config.cache.location}"
    model = scorer.model
    cfg = model.backbone.cfg
    rates = ("dropout", "attention_dropout", "embed_dropout")
    drawn = ", ".join(f"{x} {getattr(cfg, x)}" for x in rates if getattr(cfg, x, 0.0))
    if drawn:
        raise InputError(
            f"{where}: the backbone has dropout ({drawn}), so its states differ in every step; set "
            f"backbone.dropout=0, {OFF}"
        )
    # As arguments: a program may not close over arrays of several processes.
    params = jax.eval_shape(tree.merge, weights.trainable, weights.frozen)
    layer = _lowest(model, params, scorer.one_batch(train.rows[:1]))
    if layer == 0:
        raise InputError(
            f"{where}: the prompt is in the input or in layer 1, so no layer has constant "
            f"states; use a prefix in upper layers only (prompt.layers), {OFF}"
        )
    if layer is not None and not hasattr(model.backbone, "enter"):
        raise InputError(
            f"{where}: the text that a GLM generates attends to its input in every layer, so "
            "no layer can be skipped; set cache.location=''"
        )
    what = What(layer, layer is not None or model.heads["main"].reads_all)
    below = lambda part: part in _BELOW if layer is not None else part not in _HEADS
    for name in weights.trainable:
        group, part, *_ = name.split("/")
        if group == "backbone" and below(part):
            raise InputError(
                f"{where}: {name} trains, and the cached states ({what}) depend on it; exclude it "
                f"from config.trainable, {OFF}"
            )
    return what


def _lowest(model: Model, params: Any, batch: Batch) -> int | None:
    """Returns the lowest layer of the input stack that a method changes; None if it adds nothing.

    A method that changes only the decoder of a T5 leaves its whole encoder constant.
    """
    found = []
    # Masks that are numpy arrays stay so: they are known without computing anything.
    jax.eval_shape(lambda p: found.append(model.inject(p, batch)), params)
    (injection,) = found
    slots, prefix, _ = injection.encoder
    if slots is not None:
        return 0
    if prefix is not None:
        known = isinstance(prefix.mask, np.ndarray)
        return int(prefix.mask.any(axis=(1, 2)).argmax()) if known else 0
    others = injection.decoder, injection.cross
    adds = any(part is not None for stream in others for part in stream)
    return model.backbone.dims.layers if adds else None


def rest(model: Model, what: What) -> Model:
    """Returns the model that continues from the cached states."""
    if what.layer is None:
        return dataclasses.replace(model, is_cached=True)
    cfg = dataclasses.replace(model.backbone.cfg, skip=what.layer)
    return dataclasses.replace(model, backbone=model.backbone.clone(cfg=cfg))
