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
# Parts of a backbone after all its layers, which may train if the output is cached; and those up to
# its layers, which may not train if states of a lower layer are cached.
_HEADS = ("pooler", "mlm", "rtd", "lm")
_BELOW = ("embed", "layers", "bias", "relative", "conv", "later_layers")


class FeatureSpec(NamedTuple):
    """Which states are cached."""

    layer: int | None  # the input of this encoder layer; None = the output of the backbone
    all_tokens: bool  # of every token; else only the positions that the head uses

    def __str__(self) -> str:
        tokens = "every token" if self.all_tokens else "the positions that the head reads"
        if self.layer is None:
            return f"the backbone's output at {tokens}"
        return f"what layers 1-{self.layer} give for {tokens}"


def choose_features(config: RunConfig, scorer: Scorer, train: Split, weights: Any) -> FeatureSpec:
    """Returns the highest states that depend on no trainable parameter and no dropout.

    Raises InputError if there are none.
    """
    setting = f"cache.location={config.cache.location}"
    model = scorer.model
    cfg = model.backbone.cfg
    names = ("dropout", "attention_dropout", "activation_dropout", "embed_dropout")
    dropout = ", ".join(f"{x} {getattr(cfg, x)}" for x in names if getattr(cfg, x, 0.0))
    if dropout:
        raise InputError(
            f"{setting}: the backbone has dropout ({dropout}), so its states differ in every "
            f"step; set backbone.dropout=0 and backbone.attention_dropout=0, {OFF}"
        )
    # Passed as arguments: a traced function cannot close over arrays of several processes.
    params = jax.eval_shape(tree.merge, weights.trainable, weights.frozen)
    layer = _lowest_changed_layer(model, params, scorer.one_batch(train.rows[:1]))
    if layer == 0:
        raise InputError(
            f"{setting}: the prompt is in the input or in layer 1, so no layer has constant "
            f"states; use a prefix in upper layers only (prompt.layers), {OFF}"
        )
    if layer is not None and not hasattr(model.backbone, "enter"):
        raise InputError(
            f"{setting}: the text that a GLM generates attends to its input in every layer, so "
            "no layer can be skipped; set cache.location=''"
        )
    spec = FeatureSpec(layer, layer is not None or model.heads["main"].reads_all)
    for name in weights.trainable:
        group, part, *_ = name.split("/")
        is_below = part in _BELOW if layer is not None else part not in _HEADS
        if group == "backbone" and is_below:
            raise InputError(
                f"{setting}: {name} trains, and the cached states ({spec}) depend on it; exclude "
                f"it from config.trainable, {OFF}"
            )
    return spec


def _lowest_changed_layer(model: Model, params: Any, batch: Batch) -> int | None:
    """Returns the lowest layer of the input stack that a method changes; None if it adds nothing.

    A method that changes only the decoder of a T5 leaves its whole encoder constant.
    """
    injections = []
    # Masks that are numpy arrays stay numpy arrays, so their values are known.
    jax.eval_shape(lambda p: injections.append(model.inject(p, batch)), params)
    (injection,) = injections
    slots, prefix, _ = injection.encoder
    if slots is not None:
        return 0
    if prefix is not None:
        is_known = isinstance(prefix.mask, np.ndarray)
        return int(prefix.mask.any(axis=(1, 2)).argmax()) if is_known else 0
    others = injection.decoder, injection.cross
    has_prompt = any(part is not None for stream in others for part in stream)
    return model.backbone.dims.layers if has_prompt else None


def remaining_model(model: Model, spec: FeatureSpec) -> Model:
    """Returns the model that continues from the cached states."""
    if spec.layer is None:
        return dataclasses.replace(model, is_cached=True)
    cfg = dataclasses.replace(model.backbone.cfg, skip=spec.layer)
    return dataclasses.replace(model, backbone=model.backbone.clone(cfg=cfg))
