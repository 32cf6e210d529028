"""BERT and its variants: post-norm encoders with learned positions (Devlin et al. 2019)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.backbones import LayerStack, read_width
from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_positive,
    read_size,
    read_word,
    refuse_flags,
)
from jaxprompt.layers.attention import Attention, bidirectional_mask, prepend_prefix, select_queries
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, output_bias, write_slots
from jaxprompt.layers.mlp import ACTIVATIONS, Mlp
from jaxprompt.layers.norm import LayerNorm
from jaxprompt.layers.product import dot_general
from jaxprompt.layers.relpos import select_bias, with_prefix
from jaxprompt.layers.stack import read_cached_states, run_stack, stack_options
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import AttentionMask, Batch, Dims, Injection, Prefix


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """The dimensions of an encoder and how it is run."""

    vocab: int
    width: int
    embed: int
    layers: int
    heads: int
    mlp: int
    positions: int  # rows of the position table
    types: int  # of segments; 0 = none
    offset: int = 0  # row of position 0 in the position table
    activation: str = "gelu"
    lm_activation: str = "gelu"
    lm_width: int = 0  # width of the MLM head's features
    eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    model_heads: frozenset[str] = frozenset()  # in the checkpoint, see load.Report
    tied: bool = True  # the MLM head multiplies the word table
    dtype: Any = jnp.float32
    stack: str = "unroll"
    remat: str = "none"
    attention: str = "auto"
    rows: int = 0  # of the vocabulary tables, padding included; 0 = vocab
    skip: int = 0  # the first layer to run, whose input is Batch.cached
    takes: tuple[int, ...] = ()  # index of each layer's parameters, if layers share them
    drops_mlp: bool = True  # dropout after the feed-forward block
    projects: bool = False  # embeddings are projected even if they are as wide


class EncoderLayer(nn.Module):
    """One post-norm transformer layer. [B, T, H] -> [B, T, H]"""

    cfg: EncoderConfig

    @nn.compact
    def __call__(
        self, x, prefix, mask: AttentionMask, bias=None, *, deterministic, output_positions=None
    ):
        """Runs the layer, only at the positions `output_positions` [B, M] if given.

        bias: [1, N, T, T] or None.
        """
        cfg = self.cfg
        attention = Attention(
            cfg.width,
            cfg.heads,
            cfg.width // cfg.heads,
            cfg.attention_dropout,
            cfg.attention,
            cfg.dtype,
            name="attention",
        )
        k, v = attention.keys(x)
        k, v, mask = prepend_prefix(prefix, k, v, mask)
        mask, x = select_queries(output_positions, mask, x)
        bias = select_bias(output_positions, with_prefix(bias, k))
        y = attention(x, k, v, mask, bias, deterministic=deterministic)
        x = LayerNorm(cfg.eps, name="attention_norm")(
            x + Dropout(cfg.dropout)(y, deterministic=deterministic)
        )
        y = Mlp(cfg.mlp, cfg.activation, cfg.dtype, recomputed=cfg.remat == "mlp", name="mlp")(x)
        if cfg.drops_mlp:
            y = Dropout(cfg.dropout)(y, deterministic=deterministic)
        return LayerNorm(cfg.eps, name="mlp_norm")(x + y), None


class Embed(nn.Module):
    """Word, slot, position and any segment embeddings, normalised, projected. -> [B, T, H]"""

    cfg: EncoderConfig

    def setup(self):
        """Declares the tables."""
        cfg = self.cfg
        self.word = Table(cfg.rows or cfg.vocab, cfg.embed, cfg.dtype)
        self.position = Table(cfg.positions, cfg.embed, cfg.dtype)
        if cfg.types:
            self.type = Table(cfg.types, cfg.embed, cfg.dtype)
        self.norm = LayerNorm(cfg.eps)
        self.drop = Dropout(cfg.dropout)
        self.widens = cfg.projects or cfg.embed != cfg.width
        if self.widens:
            self.project = nn.Dense(cfg.width, dtype=cfg.dtype)

    def __call__(self, tokens, slots, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions."""
        # Before positions and norm, so that a soft token is embedded like a word.
        x = write_slots(self.word(tokens.ids), tokens.slot, slots)  # [B, T, E]
        x = x + self.position(tokens.positions + self.cfg.offset)
        if self.cfg.types:
            x = x + self.type(tokens.types)
        x = constrain(x, "act_batch", None, None)
        x = self.drop(self.normalize(x), deterministic=deterministic)
        return self.project(x) if self.widens else x  # [B, T, H]

    def normalize(self, x):
        """Normalises the sum of the embeddings."""
        return self.norm(x)


class LmHead(nn.Module):
    """The transform before the output embedding. [..., H] -> [..., X]"""

    cfg: EncoderConfig

    def setup(self):
        """Declares the transform, the bias and an untied table."""
        cfg = self.cfg
        self.dense = nn.Dense(cfg.lm_width, dtype=cfg.dtype)
        self.norm = LayerNorm(cfg.eps)
        rows = cfg.rows or cfg.vocab
        self.bias = self.param("bias", nn.initializers.zeros, (rows,))
        if not cfg.tied:
            self.table = self.param("table", nn.initializers.normal(0.02), (rows, cfg.lm_width))

    def __call__(self, x):
        """Transforms hidden states."""
        return self.norm(ACTIVATIONS[self.cfg.lm_activation](self.dense(x)))


class RtdHead(nn.Module):
    """ELECTRA's replaced-token logit (Clark et al. 2020). [..., H] -> [...], > 0 means replaced"""

    cfg: EncoderConfig

    @nn.compact
    def __call__(self, x):
        """Scores positions."""
        cfg = self.cfg
        x = ACTIVATIONS[cfg.activation](nn.Dense(cfg.width, dtype=cfg.dtype, name="dense")(x))
        # float32: rounding to 16 bits would make different logits equal.
        float32_product = functools.partial(dot_general, dtype=jnp.float32)
        return nn.Dense(1, dtype=cfg.dtype, dot_general=float32_product, name="out")(x)[..., 0]


class Encoder(LayerStack):
    """The encoder with every head in its checkpoint."""

    cfg: EncoderConfig
    STYLE: ClassVar[str] = "masked"
    EMBED: ClassVar[type[nn.Module]] = Embed
    LAYER: ClassVar[type[nn.Module]] = EncoderLayer
    LM: ClassVar[type[nn.Module]] = LmHead

    def setup(self):
        """Declares the parts in the checkpoint."""
        super().setup()
        cfg = self.cfg
        if "pooler" in cfg.model_heads:
            self.pooler = nn.Dense(cfg.width, dtype=cfg.dtype)
        if "mlm" in cfg.model_heads:
            self.mlm = self.LM(cfg)
        if "rtd" in cfg.model_heads:
            # Only the parameters are called `rtd`, because a method of this class is.
            self.rtd_head = RtdHead(cfg, name="rtd")

    def num_stored(self) -> int:
        """Returns the number of layers with parameters of their own."""
        return max(self.cfg.takes) + 1 if self.cfg.takes else self.cfg.layers

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need."""
        cfg = self.cfg
        return super().dims._replace(embed=cfg.embed, max_len=cfg.positions - cfg.offset)

    def __call__(
        self, batch: Batch, injection: Injection, *, deterministic: bool, output_positions=None
    ):
        """Encodes a batch: [B, T, H], or [B, M, H] at the positions `output_positions` [B, M]."""
        slots, prefix, _ = injection.encoder
        if self.cfg.skip:
            x = read_cached_states(batch.cached, self.cfg.dtype)
        else:
            x = self.embed(batch.encoder, slots, deterministic=deterministic)
        # A prefix only needs positions for a bias like T5's.
        prefix = prefix and prefix._replace(positions=None)
        return self._run(
            x,
            prefix,
            batch,
            deterministic,
            first=self.cfg.skip,
            output_positions=output_positions,
            frozen_input=slots is None,
        )

    def enter(self, batch: Batch, layer: int):
        """Computes the input of a layer below which nothing is injected. -> [B, T, H]"""
        x = self.embed(batch.encoder, None, deterministic=True)
        return self._run(x, None, batch, True, last=layer)

    def pool(self, x):
        """Applies the checkpoint's pooler. [..., H] -> [..., H]"""
        return jnp.tanh(self.pooler(x))

    def lm_features(self, x):
        """Transforms hidden states for the output embedding. [..., H] -> [..., X]"""
        return self.mlm(x)

    def lm_table(self):
        """Returns the output embedding and its bias. -> [V, X], [V]"""
        table = self.words() if self.cfg.tied else self.mlm.table
        return table, output_bias(table, self.mlm.bias, self.cfg.vocab)

    def rtd(self, x):
        """Scores how likely each token is replaced. [..., H] -> [...]"""
        return self.rtd_head(x)

    def attention_bias(self, batch: Batch):
        """Returns what is added to the scores of every layer. -> [1, N, T, T] or None"""

    def init_all(self, batch: Batch):
        """Calls every part, so that `init` creates every parameter."""
        x = self(batch, Injection(), deterministic=True)
        parts = {"pooler": self.pool, "mlm": self.lm_features, "rtd": self.rtd}
        return [parts[name](x) for name in sorted(self.cfg.model_heads & parts.keys())]

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
        mask = bidirectional_mask(batch.encoder, batch.encoder)
        return run_stack(
            self.layer,
            self.layers,
            x,
            prefix,
            mask,
            self.attention_bias(batch),
            first=first,
            last=last,
            output_positions=output_positions,
            frozen_input=frozen_input,
            param_indices=self.cfg.takes or None,
            **stack_options(self, deterministic),
        )[0]


def config_from_hf(hf: Mapping[str, Any], **changes: Any) -> EncoderConfig:
    """Reads the dimensions from the fields of a transformers config.json.

    Raises:
      InputError: if the config needs a feature that this encoder does not support.
    """
    refuse_flags(hf, "is_decoder", "add_cross_attention", "is_encoder_decoder")
    read_word(hf, "position_embedding_type", "absolute", ("absolute",))
    activation = read_word(hf, "hidden_act", "gelu", ACTIVATIONS)
    width, heads = read_width(hf)
    config = EncoderConfig(
        vocab=read_size(hf, "vocab_size"),
        width=width,
        embed=width,
        layers=read_size(hf, "num_hidden_layers"),
        heads=heads,
        mlp=read_size(hf, "intermediate_size"),
        positions=read_size(hf, "max_position_embeddings"),
        types=read_size(hf, "type_vocab_size", 2),
        activation=activation,
        lm_activation=activation,
        lm_width=width,
        eps=read_positive(hf, "layer_norm_eps", 1e-12),
        dropout=read_dropout(hf, "hidden_dropout_prob", 0.1),
        attention_dropout=read_dropout(hf, "attention_probs_dropout_prob", 0.1),
        tied=read_flag(hf, "tie_word_embeddings", True),
    )
    return dataclasses.replace(config, **changes)


def make_config(hf: Mapping[str, Any], **changes: Any) -> EncoderConfig:
    """Reads a BERT config (also SciBERT, MiniLM)."""
    return config_from_hf(hf, **changes)


Backbone = Encoder
