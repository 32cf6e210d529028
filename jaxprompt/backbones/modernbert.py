"""ModernBERT: a pre-norm encoder with rotary positions and local layers (Warner et al. 2024).

A prefix has no relative positions: its keys are not rotated, and all tokens see it, in local
layers too. The masked-LM head is the checkpoint's `head` and `decoder`. There is no pooler, so
head.pooler=auto reads [CLS] directly.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.backbones.bert import Encoder, EncoderConfig
from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_positive,
    read_size,
    read_word,
    refuse_flags,
)
from jaxprompt.convert.names.modernbert import read_biases
from jaxprompt.errors import InputError, brief
from jaxprompt.layers.attention import put_in_front, read_at, seen_of
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, write_slots
from jaxprompt.layers.mlp import ACTIVATIONS, GatedMlp
from jaxprompt.layers.norm import LayerNorm, normalize
from jaxprompt.layers.rotary import RotaryAttention, make_rates, make_turns
from jaxprompt.layers.stack import run_stack
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import Prefix, Seen, Window

_KINDS = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True)
class ModernBertConfig(EncoderConfig):
    """The dimensions of a ModernBERT and how it is run."""

    is_global: tuple[bool, ...] = ()  # of each layer; the others are local
    global_theta: float = 160000.0
    local_theta: float = 10000.0
    window: int = 64  # how far a local layer sees to each side
    biases: frozenset[str] = frozenset()  # of names_modernbert.BIASES
    embed_dropout: float = 0.0

    def norm(self, **name: Any) -> LayerNorm:
        """Returns a norm, with a bias if the config says so."""
        return LayerNorm(self.eps, "norm_bias" in self.biases, **name)


class Item(NamedTuple):
    """The inputs of one layer besides its parameters; leaves have a leading axis of layers."""

    prefix: Prefix | None
    scale: Any  # [H] of the norm before its attention
    bias: Any  # [H]
    is_global: Any  # bool
    is_first: Any  # bool: that norm is left out


class Layer(nn.Module):
    """One pre-norm layer. [B, T, H] -> [B, T, H]"""

    cfg: ModernBertConfig

    @nn.compact
    def __call__(self, x, item: Item, near, seen: Seen, turns, *, deterministic: bool, reads=None):
        """Runs the layer, only at the positions `reads` [B, M] if given.

        near: bool [B, T, T], the part of `seen` for local layers; turns: rotations of global and of
        local layers
        """
        c = self.cfg
        attention = RotaryAttention(
            c.width, c.heads, c.width // c.heads, c.attention_dropout, c.attention, c.dtype,
            use_bias="attention_bias" in c.biases, name="attention",
        )  # fmt: skip
        choose = lambda one, other: jax.tree.map(
            lambda a, b: jnp.where(item.is_global, a, b), one, other
        )
        # Lengths do not tell the mask of a local layer, and which kind a layer is may be traced.
        seen, own = seen._replace(mask=choose(seen.mask, near), lengths=None), choose(*turns)
        # A choice and no branch: under scan all layers are one program.
        y = jnp.where(item.is_first, x, normalize(x, item.scale, item.bias, c.eps))
        k, v = attention.keys(y, own)
        k, v, seen = put_in_front(item.prefix, k, v, seen)
        outside = k.shape[1] - x.shape[1]
        seen = seen._replace(window=Window(c.window + 1, ~jnp.asarray(item.is_global), outside))
        seen, x, y, own = read_at(reads, seen, x, y, own)
        y = attention(y, k, v, seen, own, deterministic=deterministic)
        # The rate of the probabilities is that of the output too.
        x = x + Dropout(c.attention_dropout)(y, deterministic=deterministic)
        mlp = GatedMlp(
            c.mlp, c.activation, True, c.dropout, c.dtype, "mlp_bias" in c.biases, name="mlp"
        )
        return x + mlp(c.norm(name="mlp_norm")(x), deterministic=deterministic), None


class Embed(nn.Module):
    """Word and slot embeddings, normalised. -> [B, T, H]"""

    cfg: ModernBertConfig

    def setup(self):
        """Declares the table."""
        c = self.cfg
        self.word = Table(c.rows or c.vocab, c.width, c.dtype)
        self.norm = c.norm()
        self.drop = Dropout(c.embed_dropout)

    def __call__(self, tokens, slots, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions."""
        x = self.word(tokens.ids)
        if slots is not None:
            x = write_slots(x, tokens.slot, slots)
        x = constrain(x, "act_batch", None, None)
        return self.drop(self.norm(x), deterministic=deterministic)


class LmHead(nn.Module):
    """The transform before the output embedding. [..., H] -> [..., H]"""

    cfg: ModernBertConfig

    def setup(self):
        """Declares the transform, and a bias and an untied table if there are any."""
        c = self.cfg
        rows = c.rows or c.vocab
        self.dense = nn.Dense(c.width, use_bias="classifier_bias" in c.biases, dtype=c.dtype)
        self.norm = c.norm()
        self.bias = None
        if "decoder_bias" in c.biases:
            self.bias = self.param("bias", nn.initializers.zeros, (rows,))
        if not c.tied:
            self.table = self.param("table", nn.initializers.normal(0.02), (rows, c.width))

    def __call__(self, x):
        """Transforms hidden states."""
        return self.norm(ACTIVATIONS[self.cfg.lm_activation](self.dense(x)))


class _Norms(nn.Module):
    """The norms before the attention of all layers but the first. -> scale, bias [L, H]"""

    cfg: ModernBertConfig

    @nn.compact
    def __call__(self):
        """Gives them, a first row in front that is not used."""
        c = self.cfg
        shape = (c.layers - 1, c.width)
        scale, bias = self.param("scale", nn.initializers.ones, shape), jnp.zeros(shape)
        if "norm_bias" in c.biases:
            bias = self.param("bias", nn.initializers.zeros, shape)
        return tuple(jnp.pad(x, [(1, 0), (0, 0)]) for x in (scale, bias))


class _Later(nn.Module):
    cfg: ModernBertConfig

    def setup(self):
        # Apart from the stack: the checkpoint's first layer has no such norm.
        self.attention_norm = _Norms(self.cfg)


class Backbone(Encoder):
    """The encoder with every head in its checkpoint."""

    cfg: ModernBertConfig
    EMBED = Embed
    LAYER = Layer
    LM = LmHead

    def setup(self):
        """Declares the parts in the checkpoint."""
        super().setup()
        self.later_layers = _Later(self.cfg)
        self.norm = self.cfg.norm()

    @nn.nowrap
    def example(self) -> tuple[Any, ...]:
        """Returns the other arguments of a layer, besides its input."""
        c = self.cfg
        item = Item(None, jnp.ones(c.width), jnp.zeros(c.width), True, True)
        rates = make_rates(c.width // c.heads, c.local_theta)
        turns = make_turns(jnp.zeros((1, 2), jnp.int32), rates)
        near = jnp.ones((1, 2, 2), bool)
        return item, near, Seen(near), (turns, turns)

    def _run(self, x, prefix, batch, deterministic: bool, *, last=None, **how: Any):
        c, tokens = self.cfg, batch.encoder
        places, seen = tokens.positions, seen_of(tokens, tokens)
        mask = seen.mask if seen.mask.ndim == 3 else seen.mask[:, None]
        seen = seen._replace(mask=jnp.broadcast_to(mask, (*places.shape, places.shape[1])))
        # The window has half of `local_attention` on either side, both ends included.
        near = seen.mask & (jnp.abs(places[:, :, None] - places[:, None]) <= c.window)
        turns = tuple(
            make_turns(places, make_rates(c.width // c.heads, theta))
            for theta in (c.global_theta, c.local_theta)
        )
        scale, bias = self.later_layers.attention_norm()
        items = Item(prefix, scale, bias, np.array(c.is_global), np.arange(c.layers) == 0)
        x, _ = run_stack(
            self.layer, self.layers, x, items, near, seen, turns, last=last, **how,
            **self._way(deterministic),
        )  # fmt: skip
        # What `enter` gives goes into a layer, so the last norm is not for it.
        return self.norm(x) if last is None else x


def make_config(hf: Mapping[str, Any], **changes: Any) -> ModernBertConfig:
    """Reads a ModernBERT config. Raises InputError if it needs an unsupported feature."""
    refuse_flags(hf, "is_decoder", "add_cross_attention", "is_encoder_decoder")
    width, layers = read_size(hf, "hidden_size"), read_size(hf, "num_hidden_layers")
    heads = read_size(hf, "num_attention_heads")
    # Rotary positions turn pairs of numbers, so the width of a head is even.
    if width % heads or width // heads % 2:
        raise InputError(
            f"hidden_size={width} must be an even multiple of num_attention_heads={heads}"
        )
    # One layer alone has no norm before its attention, and `later_layers` would be empty.
    if layers < 2:
        raise InputError(f"num_hidden_layers={layers} is not supported; it must be at least 2")
    rate = read_dropout(hf, "attention_dropout", 0.0)
    config = ModernBertConfig(
        vocab=read_size(hf, "vocab_size"),
        width=width,
        embed=width,
        layers=layers,
        heads=heads,
        mlp=read_size(hf, "intermediate_size"),
        positions=read_size(hf, "max_position_embeddings"),
        types=1,
        activation=read_word(hf, "hidden_activation", "gelu", ACTIVATIONS),
        lm_activation=read_word(hf, "classifier_activation", "gelu", ACTIVATIONS),
        lm_width=width,
        eps=read_positive(hf, "norm_eps", 1e-5),
        dropout=read_dropout(hf, "mlp_dropout", 0.0),
        embed_dropout=read_dropout(hf, "embedding_dropout", 0.0),
        attention_dropout=rate,
        tied=read_flag(hf, "tie_word_embeddings", True),
        is_global=tuple(kind == _KINDS[0] for kind in _read_kinds(hf, layers)),
        global_theta=_read_theta(hf, _KINDS[0], "global_rope_theta", 160000.0),
        local_theta=_read_theta(hf, _KINDS[1], "local_rope_theta", 10000.0),
        window=read_size(hf, "local_attention", 128) // 2,
        biases=frozenset(read_biases(hf)),
    )
    return dataclasses.replace(config, **changes)


def _read_kinds(hf: Mapping[str, Any], layers: int) -> list[str]:
    """Reads which layers are global: a list, or every so many as older configs have it."""
    kinds = hf.get("layer_types")
    if kinds is None:
        every = read_size(hf, "global_attn_every_n_layers", 3)
        return [_KINDS[layer % every > 0] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in _KINDS for k in kinds):
        raise InputError(
            f"layer_types={brief(kinds)} must be a list of {layers} entries ({', '.join(_KINDS)}), "
            "one for each of num_hidden_layers"
        )
    return kinds


def _read_theta(hf: Mapping[str, Any], kind: str, field: str, default: float) -> float:
    """Reads the base of a kind of layer's turns. Raises InputError for turns that are scaled."""
    if hf.get("rope_scaling") is not None:
        raise InputError("rope_scaling is not supported; use a checkpoint without it")
    whole = hf.get("rope_parameters")
    whole = {} if whole is None else whole
    fits = isinstance(whole, dict) and whole.keys() <= set(_KINDS)
    own = (whole.get(kind) or {}) if fits else None
    if not isinstance(own, dict) or not own.keys() <= {"rope_type", "rope_theta"}:
        raise InputError(
            f"rope_parameters={brief(whole)} is not supported; it must have one rope_theta per "
            "layer type"
        )
    if own.get("rope_type", "default") != "default":
        raise InputError(f"rope_parameters with rope_type={brief(own['rope_type'])} is not "
                         "supported; it must be default")  # fmt: skip
    if own.get("rope_theta") is not None:
        return read_positive(own, "rope_theta", default)
    return read_positive(hf, field, default)
