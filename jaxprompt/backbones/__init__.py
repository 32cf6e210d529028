"""Frozen backbones, one file per family: `make_config(hf_config)` and `Backbone(cfg)`."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.convert.hf_config import read_size
from jaxprompt.errors import InputError, nearest
from jaxprompt.layers.cache import decoding_layers
from jaxprompt.layers.embed import Table, output_bias
from jaxprompt.layers.stack import declare_param, init_stack
from jaxprompt.registry import BACKBONES
from jaxprompt.types import AttentionMask, Batch, Dims, Injection


class LayerStack(nn.Module):
    """The base of all backbones: embeddings and a stack of layers."""

    cfg: Any
    EMBED: ClassVar[type[nn.Module]]
    LAYER: ClassVar[type[nn.Module]]

    def setup(self):
        """Declares the parts in the checkpoint."""
        cfg = self.cfg
        self.embed = self.EMBED(cfg)
        self.layer = self.LAYER(cfg, parent=None)
        x = jnp.zeros((1, 2, cfg.width))
        init = init_stack(self.layer, self.num_stored(), x, *self.example())
        self.layers = declare_param(self, "layers", init)

    @nn.nowrap
    def num_stored(self) -> int:
        """Returns the number of layers with parameters of their own."""
        return self.cfg.layers

    @nn.nowrap
    def example(self) -> tuple[Any, ...]:
        """Returns the other arguments of a layer, besides its input: a prefix and a mask."""
        return None, AttentionMask(jnp.ones((1, 2), bool))

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need."""
        cfg = self.cfg
        head_dim = cfg.width // cfg.heads
        return Dims(cfg.vocab, cfg.width, cfg.width, cfg.layers, cfg.heads, head_dim, cfg.positions)

    @property
    def reads_prefix_positions(self) -> bool:
        """Whether the output depends on the positions of a prefix, `Prefix.positions`."""
        return False

    def words(self):
        """Returns the word embeddings. -> [V, E]"""
        return self.embed.word.table


class LanguageModel(LayerStack):
    """The base of backbones that generate text."""

    def setup(self):
        """Declares the parts in the checkpoint."""
        super().setup()
        cfg = self.cfg
        self.norm = cfg.norm()
        if not cfg.tied:
            self.lm = Table(cfg.rows or cfg.vocab, cfg.width, cfg.dtype)

    def reading_layers(self) -> Any:
        """Returns the layers for `cache.iterate_layers`, in a loop of `extend`."""
        return decoding_layers(self.layers, self.cfg.layers)

    def lm_features(self, x):
        """Returns the states as they are. [..., H] -> [..., H]"""
        return x

    def lm_table(self):
        """Returns the output table and no bias, except that of padding. -> [V, H], None or [V]"""
        # Not `words`, which Gemma scales.
        table = self.embed.word.table if self.cfg.tied else self.lm.table
        return table, output_bias(table, None, self.cfg.vocab)

    def init_all(self, batch: Batch):
        """Calls every part, so that `init` creates every parameter."""
        return self(batch, Injection(), deterministic=True), self.lm_table()


def read_width(
    hf: Mapping[str, Any],
    width: str = "hidden_size",
    heads: str = "num_attention_heads",
    *,
    multiple: int = 1,
) -> tuple[int, int]:
    """Reads the width and the number of heads from these fields of a transformers config.

    Raises InputError unless the width of a head is a whole number and divisible by `multiple`.
    """
    size, count = read_size(hf, width), read_size(hf, heads)
    if size % (count * multiple):
        times = f"{multiple} times " if multiple > 1 else ""
        raise InputError(f"{width}={size} must be divisible by {times}{heads}={count}")
    return size, count


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
    attention_dropout: float | None = None,
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
      attention: the attention kernel, see layers/kernels/__init__.py.
      dropout: replaces the config's dropout of hidden states; 0 is also the default of
        `attention_dropout`.
      attention_dropout: replaces the config's dropout of attention probabilities.
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
    if attention_dropout is None and dropout == 0.0:
        attention_dropout = 0.0
    if attention_dropout is not None:
        changes["attention_dropout"] = attention_dropout
    return module.Backbone(module.make_config(hf, **changes))


def with_lm_states(module: nn.Module) -> nn.Module:
    """Returns a backbone that computes the states for its LM head, as most always do."""
    if "mask_decoder" not in module.cfg.model_heads:
        return module
    return module.clone(cfg=dataclasses.replace(module.cfg, decodes=True))
