"""ModernBERT: a pre-norm encoder with rotary positions and local layers (Warner et al. 2024).

A prefix has no relative positions: its keys are not rotated, and all tokens see it, in local
layers too. The masked-LM head is the checkpoint's `head` and `decoder`. There is no pooler, so
head.pooler=auto reads [CLS] directly.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.backbones import bert, read_width
from jaxprompt.backbones.bert import Encoder, EncoderConfig
from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_layer_types,
    read_positive,
    read_size,
    read_word,
    refuse_flags,
)
from jaxprompt.convert.names.modernbert import read_biases
from jaxprompt.errors import InputError, brief
from jaxprompt.layers.attention import bidirectional_mask, prepend_prefix, select_queries
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, write_slots
from jaxprompt.layers.mlp import ACTIVATIONS, GatedMlp
from jaxprompt.layers.norm import LayerNorm, normalize
from jaxprompt.layers.rotary import RotaryAttention, make_rotations, rotary_frequencies
from jaxprompt.layers.stack import run_stack, stack_options
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import AttentionMask, AttentionWindow, Prefix

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True)
class ModernBertConfig(EncoderConfig):
    """The dimensions of a ModernBERT and how it is run."""

    is_global: tuple[bool, ...] = ()  # of each layer; the others are local
    global_theta: float = 160000.0
    local_theta: float = 10000.0
    window: int = 64  # number of positions that a local layer sees on each side
    biases: frozenset[str] = frozenset()  # of names_modernbert.BIASES
    embed_dropout: float = 0.0

    def norm(self, **name: Any) -> LayerNorm:
        """Returns a norm, with a bias if the config says so."""
        return LayerNorm(self.eps, "norm_bias" in self.biases, **name)


class ModernBertLayerInputs(NamedTuple):
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
    def __call__(
        self,
        x,
        inputs: ModernBertLayerInputs,
        local_mask,
        mask: AttentionMask,
        rotations,
        *,
        deterministic: bool,
        output_positions=None,
    ):
        """Runs the layer, only at the positions `output_positions` [B, M] if given.

        local_mask: bool [B, T, T], the part of `mask` for local layers; rotations: of global and of
        local layers.
        """
        cfg = self.cfg
        attention = RotaryAttention(
            cfg.width,
            cfg.heads,
            cfg.width // cfg.heads,
            cfg.attention_dropout,
            cfg.attention,
            cfg.dtype,
            use_bias="attention_bias" in cfg.biases,
            name="attention",
        )

        def select(of_global, of_local):
            choose = partial(jnp.where, inputs.is_global)
            return jax.tree.map(choose, of_global, of_local)

        # Lengths do not describe the mask of a local layer, and `is_global` may be traced.
        mask = mask._replace(mask=select(mask.mask, local_mask), lengths=None)
        layer_rotations = select(*rotations)
        # A choice, not a branch: under scan all layers are one program.
        y = jnp.where(inputs.is_first, x, normalize(x, inputs.scale, inputs.bias, cfg.eps))
        k, v = attention.keys(y, layer_rotations)
        k, v, mask = prepend_prefix(inputs.prefix, k, v, mask)
        prefix_length = k.shape[1] - x.shape[1]
        is_local = ~jnp.asarray(inputs.is_global)
        mask = mask._replace(window=AttentionWindow(cfg.window + 1, is_local, prefix_length))
        mask, x, y, layer_rotations = select_queries(output_positions, mask, x, y, layer_rotations)
        y = attention(y, k, v, mask, layer_rotations, deterministic=deterministic)
        # The probabilities and the output have the same dropout rate.
        x = x + Dropout(cfg.attention_dropout)(y, deterministic=deterministic)
        mlp = GatedMlp(
            cfg.mlp,
            cfg.activation,
            True,
            cfg.dropout,
            cfg.dtype,
            "mlp_bias" in cfg.biases,
            cfg.remat == "mlp",
            name="mlp",
        )
        return x + mlp(cfg.norm(name="mlp_norm")(x), deterministic=deterministic), None


class Embed(nn.Module):
    """Word and slot embeddings, normalised. -> [B, T, H]"""

    cfg: ModernBertConfig

    def setup(self):
        """Declares the table."""
        cfg = self.cfg
        self.word = Table(cfg.rows or cfg.vocab, cfg.width, cfg.dtype)
        self.norm = cfg.norm()
        self.drop = Dropout(cfg.embed_dropout)

    def __call__(self, tokens, slots, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions."""
        x = write_slots(self.word(tokens.ids), tokens.slot, slots)
        x = constrain(x, "act_batch", None, None)
        return self.drop(self.norm(x), deterministic=deterministic)


class LmHead(bert.LmHead):
    """The transform before the output embedding. [..., H] -> [..., H]"""

    cfg: ModernBertConfig

    def setup(self):
        """Declares the transform, and a bias and an untied table if there are any."""
        cfg = self.cfg
        rows = cfg.rows or cfg.vocab
        self.dense = nn.Dense(cfg.width, use_bias="classifier_bias" in cfg.biases, dtype=cfg.dtype)
        self.norm = cfg.norm()
        self.bias = None
        if "decoder_bias" in cfg.biases:
            self.bias = self.param("bias", nn.initializers.zeros, (rows,))
        if not cfg.tied:
            self.table = self.param("table", nn.initializers.normal(0.02), (rows, cfg.width))


class _AttentionNorms(nn.Module):
    """The norms before the attention of all layers but the first. -> scale, bias [L, H]"""

    cfg: ModernBertConfig

    @nn.compact
    def __call__(self):
        """Returns them after a first row that is not used."""
        cfg = self.cfg
        shape = (cfg.layers - 1, cfg.width)
        scale, bias = self.param("scale", nn.initializers.ones, shape), jnp.zeros(shape)
        if "norm_bias" in cfg.biases:
            bias = self.param("bias", nn.initializers.zeros, shape)
        return tuple(jnp.pad(x, [(1, 0), (0, 0)]) for x in (scale, bias))


class _LaterLayers(nn.Module):
    cfg: ModernBertConfig

    def setup(self):
        # Not in the stack: the checkpoint's first layer has no such norm.
        self.attention_norm = _AttentionNorms(self.cfg)


class Backbone(Encoder):
    """The encoder with every head in its checkpoint."""

    cfg: ModernBertConfig
    EMBED = Embed
    LAYER = Layer
    LM = LmHead

    def setup(self):
        """Declares the parts in the checkpoint."""
        super().setup()
        self.later_layers = _LaterLayers(self.cfg)
        self.norm = self.cfg.norm()

    @nn.nowrap
    def example(self) -> tuple[Any, ...]:
        """Returns the other arguments of a layer, besides its input."""
        cfg = self.cfg
        inputs = ModernBertLayerInputs(None, jnp.ones(cfg.width), jnp.zeros(cfg.width), True, True)
        frequencies = rotary_frequencies(cfg.width // cfg.heads, cfg.local_theta)
        rotations = make_rotations(jnp.zeros((1, 2), jnp.int32), frequencies)
        local_mask = jnp.ones((1, 2, 2), bool)
        return inputs, local_mask, AttentionMask(local_mask), (rotations, rotations)

    def _run(self, x, prefix, batch, deterministic: bool, *, last=None, **options: Any):
        cfg, tokens = self.cfg, batch.encoder
        positions, mask = tokens.positions, bidirectional_mask(tokens, tokens)
        visible = mask.mask if mask.mask.ndim == 3 else mask.mask[:, None]
        visible = jnp.broadcast_to(visible, (*positions.shape, positions.shape[1]))
        mask = mask._replace(mask=visible)
        # The window has half of `local_attention` on either side, both ends included.
        is_near = jnp.abs(positions[:, :, None] - positions[:, None]) <= cfg.window
        local_mask = visible & is_near
        rotations = tuple(
            make_rotations(positions, rotary_frequencies(cfg.width // cfg.heads, theta))
            for theta in (cfg.global_theta, cfg.local_theta)
        )
        scale, bias = self.later_layers.attention_norm()
        layer_inputs = ModernBertLayerInputs(
            prefix, scale, bias, np.array(cfg.is_global), np.arange(cfg.layers) == 0
        )
        x, _ = run_stack(
            self.layer,
            self.layers,
            x,
            layer_inputs,
            local_mask,
            mask,
            rotations,
            last=last,
            **options,
            **stack_options(self, deterministic),
        )
        # The result of `enter` is the input of a layer, without the last norm.
        return self.norm(x) if last is None else x


def make_config(hf: Mapping[str, Any], **changes: Any) -> ModernBertConfig:
    """Reads a ModernBERT config. Raises InputError if it needs an unsupported feature."""
    refuse_flags(hf, "is_decoder", "add_cross_attention", "is_encoder_decoder")
    layers = read_size(hf, "num_hidden_layers")
    # Rotary positions rotate pairs, so the width of a head is even.
    width, heads = read_width(hf, multiple=2)
    # A single layer has no norm before its attention, and `later_layers` would be empty.
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
        is_global=tuple(kind == _LAYER_TYPES[0] for kind in _read_kinds(hf, layers)),
        global_theta=_read_theta(hf, _LAYER_TYPES[0], "global_rope_theta", 160000.0),
        local_theta=_read_theta(hf, _LAYER_TYPES[1], "local_rope_theta", 10000.0),
        window=read_size(hf, "local_attention", 128) // 2,
        biases=frozenset(read_biases(hf)),
    )
    return dataclasses.replace(config, **changes)


def _read_kinds(hf: Mapping[str, Any], layers: int) -> list[str]:
    """Reads the type of each layer: a list, or a period in older configs."""
    if (types := read_layer_types(hf, layers, _LAYER_TYPES)) is not None:
        return types
    period = read_size(hf, "global_attn_every_n_layers", 3)
    return [_LAYER_TYPES[layer % period > 0] for layer in range(layers)]


def _read_theta(hf: Mapping[str, Any], kind: str, field: str, default: float) -> float:
    """Reads the RoPE base of a layer type. Raises InputError for scaled RoPE."""
    if hf.get("rope_scaling") is not None:
        raise InputError("rope_scaling is not supported; use a checkpoint without it")
    parameters = hf.get("rope_parameters")
    parameters = {} if parameters is None else parameters
    is_by_type = isinstance(parameters, dict) and parameters.keys() <= set(_LAYER_TYPES)
    rope = (parameters.get(kind) or {}) if is_by_type else None
    if (
        not isinstance(rope, dict)
        or rope.keys() - {"rope_type", "rope_theta"}
        or rope.get("rope_type", "default") != "default"
    ):
        raise InputError(
            f"rope_parameters={brief(parameters)} is not supported; it must have one rope_theta "
            "per layer type, with rope_type=default"
        )
    return read_positive(rope, "rope_theta", read_positive(hf, field, default))
