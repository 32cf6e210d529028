"""DeBERTa v2 and v3: attention by content and by relative position (He et al. 2021).

If a checkpoint has position embeddings that its input does not use, its masked-LM head reads the
states of the enhanced mask decoder (section 3.2), as in the released code: the last layer runs
twice with other queries. transformers reads no such table and has no decoder.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.backbones.bert import Encoder, EncoderConfig, config_from_hf
from jaxprompt.convert.hf_config import read_flag, read_positive, read_size, read_word
from jaxprompt.convert.names.deberta import (
    conv_width,
    distance_limit,
    distance_span,
    norms_positions,
    read_terms,
)
from jaxprompt.errors import InputError, brief
from jaxprompt.layers.attention import bidirectional_mask, prepend_prefix, select_queries
from jaxprompt.layers.disentangled import Disentangled
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, write_slots
from jaxprompt.layers.mlp import ACTIVATIONS, Mlp
from jaxprompt.layers.norm import LayerNorm
from jaxprompt.layers.product import einsum
from jaxprompt.layers.reading import select_positions
from jaxprompt.layers.stack import run_stack
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import NO_LIMIT, AttentionMask, Batch, Dims, Prefix


@dataclasses.dataclass(frozen=True)
class DebertaConfig(EncoderConfig):
    """The dimensions of a DeBERTa and how it is run."""

    terms: tuple[str, ...] = ()  # of distance: c2p, p2c
    span: int = 0  # half the rows of the table of distances; 0 = no table
    buckets: int = -1
    limit: int = 0  # the distance from which all are one bucket
    norms_relative: bool = False
    shares_projections: bool = False  # distances are projected as contents are
    joined: bool = False  # v1: one kernel of queries, keys and values
    has_positions: bool = True  # in the input
    has_types: bool = True
    pooler_activation: str = "gelu"
    conv: int = 0  # width of the convolution behind the first layer
    conv_activation: str = "tanh"
    decodes: bool = False  # states are those of the mask decoder


class Layer(nn.Module):
    """One post-norm layer. [B, T, H] -> [B, T, H]"""

    cfg: DebertaConfig

    @nn.compact
    def __call__(
        self, x, prefix, seen: AttentionMask, relative=None, *, deterministic: bool, reads=None,
        queries=None,
    ):  # fmt: skip
        """Runs the layer, only at the positions `reads` [B, M] if given.

        `queries` [B, T or M, H] take the place of x where it asks, and where it is added.
        """
        c = self.cfg
        head_dim = c.width // c.heads
        attention = Disentangled(
            c.width, c.heads, head_dim, c.attention_dropout, c.attention, c.dtype,
            (head_dim * (1 + len(c.terms))) ** -0.5, terms=c.terms, joined=c.joined,
            shared=c.shares_projections, span=c.span, buckets=c.buckets, limit=c.limit,
            hidden_dropout=c.dropout, name="attention",
        )  # fmt: skip
        drop = Dropout(c.dropout)
        k, v = attention.keys(x)
        k, v, seen = prepend_prefix(prefix, k, v, seen)
        seen, own = select_queries(reads, seen, x)
        if queries is not None:
            own = queries
        y = attention(x, k, v, seen, relative, reads, queries=queries, deterministic=deterministic)
        x = LayerNorm(c.eps, name="attention_norm")(own + drop(y, deterministic=deterministic))
        y = Mlp(c.mlp, c.activation, c.dtype, name="mlp")(x)
        return LayerNorm(c.eps, name="mlp_norm")(x + drop(y, deterministic=deterministic)), None


class Embed(nn.Module):
    """Word and slot embeddings, plus position and segment if present, projected and normalised.

    -> [B, T, H]
    """

    cfg: DebertaConfig

    def setup(self):
        """Declares the tables."""
        c = self.cfg
        self.word = Table(c.rows or c.vocab, c.embed, c.dtype)
        if c.has_positions:
            self.position = Table(c.positions, c.embed, c.dtype)
        if c.has_types:
            self.type = Table(c.types, c.embed, c.dtype)
        if c.embed != c.width:
            # transformers' embed_proj has no bias, unlike ELECTRA's.
            self.project = nn.Dense(c.width, use_bias=False, dtype=c.dtype)
        self.norm = LayerNorm(c.eps)
        self.drop = Dropout(c.dropout)

    def __call__(self, tokens, slots, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions."""
        c = self.cfg
        x = self.word(tokens.ids)  # [B, T, E]
        if slots is not None:
            x = write_slots(x, tokens.slot, slots)
        if c.has_positions:
            x = x + self.position(tokens.positions)
        if c.has_types:
            x = x + self.type(tokens.types)
        x = constrain(x, "act_batch", None, None)
        if c.embed != c.width:
            x = self.project(x)  # [B, T, H]
        return self.drop(self.norm(x), deterministic=deterministic)


class Relative(nn.Module):
    """The relative position embeddings, normalised if the config says so. -> [R, H]"""

    cfg: DebertaConfig

    @nn.compact
    def __call__(self):
        """Returns the table."""
        c = self.cfg
        table = self.param("table", nn.initializers.normal(0.02), (2 * c.span, c.width))
        table = table.astype(c.dtype)
        return LayerNorm(c.eps, name="norm")(table) if c.norms_relative else table


class Convolution(nn.Module):
    """Adds a convolution of the embeddings to the first layer's output. [B, T, H] x 2 -> [B, T, H]

    Mixes only real tokens of the same document.
    """

    cfg: DebertaConfig

    @nn.compact
    def __call__(self, x, y, tokens, *, deterministic: bool):
        """Convolves x, adds the result to y and normalises."""
        c = self.cfg
        kernel = self.param("kernel", nn.initializers.normal(0.02), (c.width, c.width, c.conv))
        bias = self.param("bias", nn.initializers.zeros, (c.width,))
        length, half = x.shape[1], c.conv // 2
        around = [(0, 0), (half, half)]
        # In transformers embeddings of padding are 0, which the convolution alone can see.
        wide = jnp.pad(jnp.where(tokens.mask[..., None], x, 0.0), [*around, (0, 0)])
        own = tokens.segments
        # The bias is added to padding too; it is taken out below.
        found = jnp.broadcast_to(bias.astype(c.dtype), x.shape)
        for tap in range(c.conv):
            part = wide[:, tap : tap + length]
            if own is not None:
                same = jnp.pad(own, around)[:, tap : tap + length] == own
                part = jnp.where(same[..., None], part, 0.0)
            found = found + einsum("bth,oh->bto", part, kernel[:, :, tap].astype(c.dtype))
        # Dropout stands in front of the activation.
        found = jnp.where(tokens.mask[..., None], found, 0.0)
        found = Dropout(c.dropout)(found, deterministic=deterministic)
        return LayerNorm(c.eps, name="norm")(y + ACTIVATIONS[c.conv_activation](found))


class Backbone(Encoder):
    """The encoder with every head in its checkpoint."""

    cfg: DebertaConfig
    EMBED = Embed
    LAYER = Layer

    def setup(self):
        """Declares the parts in the checkpoint."""
        super().setup()
        c = self.cfg
        if c.span:
            self.relative = Relative(c)
        if c.conv:
            self.conv = Convolution(c)
        if "mask_decoder" in c.model_heads:
            self.mask_decoder = Table(c.positions, c.width, c.dtype)

    @nn.nowrap
    def example(self) -> tuple[Any, ...]:
        """Also returns the relative position embeddings, if there are any."""
        c = self.cfg
        return *super().example(), *((jnp.zeros((2 * c.span, c.width)),) if c.span else ())

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need."""
        dims, counts = super().dims, self.cfg.has_positions or self.cfg.decodes
        return dims if counts else dims._replace(max_len=NO_LIMIT)

    def pool(self, x):
        """Applies the checkpoint's pooler. [..., H] -> [..., H]"""
        return ACTIVATIONS[self.cfg.pooler_activation](self.pooler(x))

    def init_all(self, batch):
        """Calls every part, including the mask decoder's table."""
        if "mask_decoder" in self.cfg.model_heads:
            self.mask_decoder(batch.encoder.positions)
        return super().init_all(batch)

    def _run(
        self, x, prefix: Prefix | None, batch: Batch, deterministic: bool, *, first: int = 0,
        last: int | None = None, reads=None, fresh: bool = False,
    ):  # fmt: skip
        tokens, way, behind, top = batch.encoder, self._way(deterministic), None, self.cfg.layers
        given = bidirectional_mask(tokens, tokens), *((self.relative(),) if self.cfg.span else ())
        if self.cfg.conv:
            # x is the embeddings where layer 0 runs, and elsewhere `run_stack` does not call this.
            behind = lambda y: self.conv(x, y, tokens, deterministic=deterministic)
        run = lambda x, **how: run_stack(
            self.layer, self.layers, x, prefix, *given, **(way | how)
        )[0]  # fmt: skip
        how = dict(first=first, behind_first=behind, fresh=fresh)
        # What was run to its end before is decoded.
        if not self.cfg.decodes or first == top or last not in (None, top):
            return run(x, last=last, reads=reads, **how)
        return self._decode(run(x, last=top - 1, **how), run, tokens, reads, way["key"])

    def _decode(self, x, run, tokens, reads, key):
        """Runs the last layer twice from positions to the states below it. -> [B, T or M, H]

        The first queries are these states and the table's positions, the second what the first
        gave; keys and values are the states' both times (released code, emd_context_layer).
        """
        found = x + self.mask_decoder(tokens.positions)
        found = found if reads is None else select_positions(found, reads)
        for turn in range(2):
            # The layer has one number: its dropout is another each time.
            own = None if key is None else jax.random.fold_in(key, self.cfg.layers + turn)
            found = run(x, first=self.cfg.layers - 1, reads=reads, queries=found, key=own)
        return found


def deberta_config(hf: Mapping[str, Any], **changes: Any) -> DebertaConfig:
    """Reads what v1 and v2 share. Raises InputError if it needs an unsupported feature."""
    width = read_size(hf, "hidden_size")
    embed = read_size(hf, "embedding_size", width)
    legacy, types = read_flag(hf, "legacy", True), hf.get("type_vocab_size") or 0
    relative = read_flag(hf, "relative_attention", False)
    heads = read_size(hf, "num_attention_heads")
    for field, only in {"pooler_hidden_size": width, "attention_head_size": width // heads}.items():
        if hf.get(field) not in (None, only):
            raise InputError(
                f"{field}={brief(hf[field])} is not supported; with hidden_size={width} and "
                f"num_attention_heads={heads} it must be {only}"
            )
    if not legacy and (embed != width or not read_flag(hf, "tie_word_embeddings", True)):
        raise InputError(
            "legacy=false is not supported if embedding_size differs from hidden_size or "
            "tie_word_embeddings=false, because its head multiplies the word embeddings"
        )
    if changes.get("attention") == "fused":
        raise InputError(
            "attention=fused is not supported for DeBERTa, for which there is no kernel; use auto"
        )
    own = dict(
        embed=embed,
        lm_width=embed,
        terms=read_terms(hf),
        span=distance_span(hf) if relative else 0,
        limit=distance_limit(hf) if relative else 0,
        has_positions=read_flag(hf, "position_biased_input", True),
        has_types=bool(types),
        pooler_activation=read_word(hf, "pooler_hidden_act", "gelu", ACTIVATIONS),
        eps=read_positive(hf, "layer_norm_eps", 1e-7),
    )
    changes = changes | {"attention": "einsum"}
    # The encoder's table has one row at least; `has_types` says whether it is used.
    plain = dataclasses.asdict(config_from_hf({**hf, "type_vocab_size": types or 1}))
    return DebertaConfig(**(plain | own | changes))


def make_config(hf: Mapping[str, Any], **changes: Any) -> DebertaConfig:
    """Reads a DeBERTa v2 or v3 config."""
    if hf.get("conv_groups", 1) != 1 and conv_width(hf):
        raise InputError(f"conv_groups={brief(hf['conv_groups'])} is not supported; it must be 1")
    conv = conv_width(hf)
    own = dict(
        buckets=hf.get("position_buckets") or -1,
        norms_relative=norms_positions(hf),
        shares_projections=read_flag(hf, "share_att_key", False),
        conv=conv,
    )
    if conv:
        own["conv_activation"] = read_word(hf, "conv_act", "tanh", ACTIVATIONS)
    return deberta_config(hf, **(own | changes))
