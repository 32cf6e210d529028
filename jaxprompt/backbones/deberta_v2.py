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
from jaxprompt.layers.stack import run_stack, stack_options
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import NO_LIMIT, AttentionMask, Batch, Dims, Prefix


@dataclasses.dataclass(frozen=True)
class DebertaConfig(EncoderConfig):
    """The dimensions of a DeBERTa and how it is run."""

    terms: tuple[str, ...] = ()  # of distance: c2p, p2c
    span: int = 0  # half the rows of the distance table; 0 = no table
    buckets: int = -1
    limit: int = 0  # distances from here on share a bucket
    norms_relative: bool = False
    shares_projections: bool = False  # distances are projected like contents
    joined: bool = False  # v1: one kernel for queries, keys and values
    has_positions: bool = True  # in the input
    has_types: bool = True
    pooler_activation: str = "gelu"
    conv: int = 0  # width of the convolution after the first layer
    conv_activation: str = "tanh"
    decodes: bool = False  # states are those of the mask decoder


class Layer(nn.Module):
    """One post-norm layer. [B, T, H] -> [B, T, H]"""

    cfg: DebertaConfig

    @nn.compact
    def __call__(
        self,
        x,
        prefix,
        mask: AttentionMask,
        relative=None,
        *,
        deterministic: bool,
        output_positions=None,
        queries=None,
    ):
        """Runs the layer, only at the positions `output_positions` [B, M] if given.

        `queries` [B, T or M, H] replace x as queries and as the residual.
        """
        cfg = self.cfg
        head_dim = cfg.width // cfg.heads
        attention = Disentangled(
            cfg.width,
            cfg.heads,
            head_dim,
            cfg.attention_dropout,
            cfg.attention,
            cfg.dtype,
            (head_dim * (1 + len(cfg.terms))) ** -0.5,
            terms=cfg.terms,
            joined=cfg.joined,
            shared=cfg.shares_projections,
            span=cfg.span,
            buckets=cfg.buckets,
            limit=cfg.limit,
            hidden_dropout=cfg.dropout,
            name="attention",
        )
        drop = Dropout(cfg.dropout)
        k, v = attention.keys(x)
        k, v, mask = prepend_prefix(prefix, k, v, mask)
        mask, residual = select_queries(output_positions, mask, x)
        if queries is not None:
            residual = queries
        y = attention(
            x, k, v, mask, relative, output_positions, queries=queries, deterministic=deterministic
        )
        x = residual + drop(y, deterministic=deterministic)
        x = LayerNorm(cfg.eps, name="attention_norm")(x)
        y = Mlp(cfg.mlp, cfg.activation, cfg.dtype, recomputed=cfg.remat == "mlp", name="mlp")(x)
        return LayerNorm(cfg.eps, name="mlp_norm")(x + drop(y, deterministic=deterministic)), None


class Embed(nn.Module):
    """Word and slot embeddings, plus position and segment if present, projected and normalised.

    -> [B, T, H]
    """

    cfg: DebertaConfig

    def setup(self):
        """Declares the tables."""
        cfg = self.cfg
        self.word = Table(cfg.rows or cfg.vocab, cfg.embed, cfg.dtype)
        if cfg.has_positions:
            self.position = Table(cfg.positions, cfg.embed, cfg.dtype)
        if cfg.has_types:
            self.type = Table(cfg.types, cfg.embed, cfg.dtype)
        if cfg.embed != cfg.width:
            # transformers' embed_proj has no bias, unlike ELECTRA's.
            self.project = nn.Dense(cfg.width, use_bias=False, dtype=cfg.dtype)
        self.norm = LayerNorm(cfg.eps)
        self.drop = Dropout(cfg.dropout)

    def __call__(self, tokens, slots, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions."""
        cfg = self.cfg
        x = write_slots(self.word(tokens.ids), tokens.slot, slots)  # [B, T, E]
        if cfg.has_positions:
            x = x + self.position(tokens.positions)
        if cfg.has_types:
            x = x + self.type(tokens.types)
        x = constrain(x, "act_batch", None, None)
        if cfg.embed != cfg.width:
            x = self.project(x)  # [B, T, H]
        return self.drop(self.norm(x), deterministic=deterministic)


class Relative(nn.Module):
    """The relative position embeddings, normalised if the config says so. -> [R, H]"""

    cfg: DebertaConfig

    @nn.compact
    def __call__(self):
        """Returns the table."""
        cfg = self.cfg
        table = self.param("table", nn.initializers.normal(0.02), (2 * cfg.span, cfg.width))
        table = table.astype(cfg.dtype)
        return LayerNorm(cfg.eps, name="norm")(table) if cfg.norms_relative else table


class Convolution(nn.Module):
    """Adds a convolution of the embeddings to the first layer's output. [B, T, H] x 2 -> [B, T, H]

    Mixes only real tokens of the same document.
    """

    cfg: DebertaConfig

    @nn.compact
    def __call__(self, x, y, tokens, *, deterministic: bool):
        """Convolves x, adds the result to y and normalises."""
        cfg = self.cfg
        shape = (cfg.width, cfg.width, cfg.conv)
        kernel = self.param("kernel", nn.initializers.normal(0.02), shape)
        bias = self.param("bias", nn.initializers.zeros, (cfg.width,))
        length, margin = x.shape[1], cfg.conv // 2
        padding = [(0, 0), (margin, margin)]
        # In transformers embeddings of padding are 0, which only affects the convolution.
        padded = jnp.pad(jnp.where(tokens.mask[..., None], x, 0.0), [*padding, (0, 0)])
        segments = tokens.segments
        # The bias is added to padding too, and removed below.
        convolved = jnp.broadcast_to(bias.astype(cfg.dtype), x.shape)
        for tap in range(cfg.conv):
            shifted = padded[:, tap : tap + length]
            if segments is not None:
                same_segment = jnp.pad(segments, padding)[:, tap : tap + length] == segments
                shifted = jnp.where(same_segment[..., None], shifted, 0.0)
            tap_kernel = kernel[:, :, tap].astype(cfg.dtype)
            convolved = convolved + einsum("bth,oh->bto", shifted, tap_kernel)
        # Dropout comes before the activation.
        convolved = jnp.where(tokens.mask[..., None], convolved, 0.0)
        convolved = Dropout(cfg.dropout)(convolved, deterministic=deterministic)
        return LayerNorm(cfg.eps, name="norm")(y + ACTIVATIONS[cfg.conv_activation](convolved))


class Backbone(Encoder):
    """The encoder with every head in its checkpoint."""

    cfg: DebertaConfig
    EMBED = Embed
    LAYER = Layer

    def setup(self):
        """Declares the parts in the checkpoint."""
        super().setup()
        cfg = self.cfg
        if cfg.span:
            self.relative = Relative(cfg)
        if cfg.conv:
            self.conv = Convolution(cfg)
        if "mask_decoder" in cfg.model_heads:
            self.mask_decoder = Table(cfg.positions, cfg.width, cfg.dtype)

    @nn.nowrap
    def example(self) -> tuple[Any, ...]:
        """Also returns the relative position embeddings, if there are any."""
        cfg = self.cfg
        return *super().example(), *((jnp.zeros((2 * cfg.span, cfg.width)),) if cfg.span else ())

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need."""
        dims, has_positions = super().dims, self.cfg.has_positions or self.cfg.decodes
        return dims if has_positions else dims._replace(max_len=NO_LIMIT)

    def pool(self, x):
        """Applies the checkpoint's pooler. [..., H] -> [..., H]"""
        return ACTIVATIONS[self.cfg.pooler_activation](self.pooler(x))

    def init_all(self, batch):
        """Calls every part, including the mask decoder's table."""
        if "mask_decoder" in self.cfg.model_heads:
            self.mask_decoder(batch.encoder.positions)
        return super().init_all(batch)

    def _run(
        self,
        x,
        prefix: Prefix | None,
        batch: Batch,
        deterministic: bool,
        *,
        first: int = 0,
        last: int | None = None,
        output_positions=None,
        frozen_input: bool = False,
    ):
        tokens, num_layers, after_first = batch.encoder, self.cfg.layers, None
        shared_options = stack_options(self, deterministic)
        shared = bidirectional_mask(tokens, tokens), *((self.relative(),) if self.cfg.span else ())
        if self.cfg.conv:
            # `run_stack` only calls this if layer 0 runs: then x is the embeddings.
            def after_first(y):
                return self.conv(x, y, tokens, deterministic=deterministic)

        def run_layers(x, **options):
            options = shared_options | options
            return run_stack(self.layer, self.layers, x, prefix, *shared, **options)[0]

        options = dict(first=first, after_first=after_first, frozen_input=frozen_input)
        # Cached states of the last layer are decoded already.
        if not self.cfg.decodes or first == num_layers or last not in (None, num_layers):
            return run_layers(x, last=last, output_positions=output_positions, **options)
        x = run_layers(x, last=num_layers - 1, **options)
        return self._decode(x, run_layers, tokens, output_positions, shared_options["key"])

    def _decode(self, x, run_layers, tokens, output_positions, key):
        """Runs the last layer twice with position queries. -> [B, T or M, H]

        The first queries are the states x plus the table's positions, the second the first output;
        keys and values are those of x both times (released code, emd_context_layer).
        """
        last = self.cfg.layers - 1
        queries = x + self.mask_decoder(tokens.positions)
        if output_positions is not None:
            queries = select_positions(queries, output_positions)
        for pass_index in range(2):
            # Another dropout key in each pass, since the layer's index is the same.
            if key is not None:
                key_of_pass = jax.random.fold_in(key, self.cfg.layers + pass_index)
            queries = run_layers(
                x,
                first=last,
                output_positions=output_positions,
                queries=queries,
                key=None if key is None else key_of_pass,
            )
        return queries


def deberta_config(hf: Mapping[str, Any], **changes: Any) -> DebertaConfig:
    """Reads what v1 and v2 share. Raises InputError if it needs an unsupported feature."""
    width = read_size(hf, "hidden_size")
    embed = read_size(hf, "embedding_size", width)
    legacy, types = read_flag(hf, "legacy", True), hf.get("type_vocab_size") or 0
    relative = read_flag(hf, "relative_attention", False)
    heads = read_size(hf, "num_attention_heads")
    sizes = {"pooler_hidden_size": width, "attention_head_size": width // heads}
    for field, required in sizes.items():
        if hf.get(field) not in (None, required):
            raise InputError(
                f"{field}={brief(hf[field])} is not supported; with hidden_size={width} and "
                f"num_attention_heads={heads} it must be {required}"
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
    fields = dict(
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
    # The encoder's table has at least one row; `has_types` says whether it is used.
    encoder_fields = dataclasses.asdict(config_from_hf({**hf, "type_vocab_size": types or 1}))
    return DebertaConfig(**(encoder_fields | fields | changes))


def make_config(hf: Mapping[str, Any], **changes: Any) -> DebertaConfig:
    """Reads a DeBERTa v2 or v3 config."""
    if hf.get("conv_groups", 1) != 1 and conv_width(hf):
        raise InputError(f"conv_groups={brief(hf['conv_groups'])} is not supported; it must be 1")
    conv = conv_width(hf)
    fields = dict(
        buckets=hf.get("position_buckets") or -1,
        norms_relative=norms_positions(hf),
        shares_projections=read_flag(hf, "share_att_key", False),
        conv=conv,
    )
    if conv:
        fields["conv_activation"] = read_word(hf, "conv_act", "tanh", ACTIVATIONS)
    return deberta_config(hf, **(fields | changes))
