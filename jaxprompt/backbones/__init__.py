"""Frozen backbones, one file per family: `make_config(hf_config)` and `Backbone(cfg)`."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.errors import InputError, nearest
from jaxprompt.registry import BACKBONES


def families() -> list[str]:
    """Lists the families, including those of installed packages."""
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
) -> nn.Module:
    """Returns the backbone module of a transformers config, with the heads in its checkpoint.

    Args:
      family: the backbone family.
      hf: the transformers config.
      heads: the heads in the checkpoint.
      dtype: "float32" or "bfloat16".
      stack: "scan" or "unroll", see layers/stack.py.
      remat: what is recomputed in the backward pass, see layers/stack.py.
      attention: the attention kernel, see layers/kernels.py.
      dropout: replaces the config's dropout of hidden states; that of attention is kept, except
        that 0 turns both off.
      rescale: divides T5's residual stream, see convert/load.py.

    Raises:
      InputError: if the family is unknown or does not support `rescale`.
    """
    if family not in families():
        raise InputError(f"unknown backbone family {family!r}; {nearest(family, families())}")
    module = BACKBONES.load(family)
    changes: dict[str, Any] = dict(
        model_heads=frozenset(heads),
        dtype=jnp.dtype(dtype),
        stack=stack,
        remat=remat,
        attention=attention,
    )
    # Shows which of the other fields this family has.
    default_config = module.make_config(hf, **changes)
    if rescale != 1.0:
        if not hasattr(default_config, "rescale"):
            raise InputError(
                f"backbone.rescale={rescale} is only valid with T5; set it to 1 for {family}"
            )
        changes["rescale"] = rescale
    if dropout is not None:
        changes["dropout"] = dropout
        # BERT and T5 have one rate for both.
        if hasattr(default_config, "embed_dropout"):
            changes["embed_dropout"] = dropout
    if dropout == 0.0:
        changes["attention_dropout"] = 0.0
    return module.Backbone(module.make_config(hf, **changes))


def with_lm_states(module: nn.Module) -> nn.Module:
    """Returns a backbone that computes the states for its LM head, as most always do."""
    if "mask_decoder" not in module.cfg.model_heads:
        return module
    return module.clone(cfg=dataclasses.replace(module.cfg, decodes=True))
