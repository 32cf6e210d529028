"""Frozen models, one file a family: `make_config(hf_config)` and `Backbone(cfg)`."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp

from jaxprompt.errors import InputError, nearest
from jaxprompt.registry import BACKBONES


def families() -> list[str]:
    """Lists the families, those of installed packages too."""
    return BACKBONES.names()


def make_backbone(
    family: str,
    hf: Mapping[str, Any],
    heads: Collection[str],
    *,
    dtype: str = "float32",
    stack: str = "unroll",
    remat: str = "none",
    attention: str = "auto",
    dropout: float | None = None,
    rescale: float = 1.0,
):
    """Makes the backbone module of a transformers config, with the heads that its checkpoint holds.

    `dropout` replaces the config's dropout of hidden states; the attention's stays, save that 0
    turns both off. `rescale` divides T5's residual stream, see convert/load.py. Raises InputError
    for an unknown family, and a rescale that it does not know.
    """
    if family not in families():
        raise InputError(f"unknown backbone family {family!r}; {nearest(family, families())}")
    module = BACKBONES.load(family)
    changes = dict(
        model_heads=frozenset(heads),
        dtype=jnp.dtype(dtype),
        stack=stack,
        remat=remat,
        attention=attention,
    )
    has = module.make_config(hf, **changes)  # tells which of the others this family knows
    if rescale != 1.0:
        if not hasattr(has, "rescale"):
            raise InputError(f"backbone.rescale={rescale} is for T5; set it to 1 for {family}")
        changes["rescale"] = rescale
    if dropout is not None:
        changes["dropout"] = dropout
        # BERT and T5 have one rate for both.
        if hasattr(has, "embed_dropout"):
            changes["embed_dropout"] = dropout
    if dropout == 0.0:
        changes["attention_dropout"] = 0.0
    return module.Backbone(module.make_config(hf, **changes))


def for_words(module):
    """Makes a backbone compute the states that its LM head reads, which most do in any case."""
    if "mask_decoder" not in module.cfg.model_heads:
        return module
    return module.clone(cfg=dataclasses.replace(module.cfg, decodes=True))
