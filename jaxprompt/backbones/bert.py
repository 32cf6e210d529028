"""BERT and its variants: post-norm encoders with learned positions (Devlin et al. 2019)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_positive,
    read_size,
    read_word,
    refuse_flags,
)
from jaxprompt.errors import InputError
from jaxprompt.layers.attention import Attention, put_in_front, read_at, seen_of
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, output_bias, write_slots
from jaxprompt.layers.mlp import ACTIVATIONS, Mlp
from jaxprompt.layers.norm import LayerNorm
from jaxprompt.layers.product import dot_general
from jaxprompt.layers.stack import declare, init_stack, run_stack, take_kept
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import Batch, Dims, Injection, Prefix, Seen


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
    types: int
    offset: int = 0  # row of the position table where position 0 stands
    activation: str = "gelu"
    lm_activation: str = "gelu"
    lm_width: int = 0  # width of the MLM head's features
    eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    model_heads: frozenset[str] = frozenset()  # those in the checkpoint, see load.Report
    tied: bool = True  # the MLM head multiplies the word table
    dtype: Any = jnp.float32
    stack: str = "unroll"
    remat: str = "none"
    attention: str = "auto"
    rows: int = 0  # of the vocabulary tables, padding included; 0 = vocab
    skip: int = 0  # layers below this one are not run: Batch.kept is what enters it
    takes: tuple[int, ...] = ()  # the parameters that each layer takes, where layers share them
    drops_mlp: bool = True  # dropout behind the feed-forward block
    projects: bool = False  # embeddings are widened though they are as wide


class EncoderLayer(nn.Module):
    """One post-norm transformer layer. [B, T, H] -> [B, T, H]"""

    cfg: EncoderConfig

    @nn.compact
    def __call__(self, x, prefix, seen: Seen, *, deterministic: bool, reads=None):
        """Runs the layer, only at the positions `reads` [B, M] if given."""
        c = self.cfg
        norm = lambda name: LayerNorm(c.eps, name=name)
        attention = Attention(
            c.width, c.heads, c.width // c.heads, c.attention_dropout, c.attention, c.dtype,
            name="attention",
        )  # fmt: skip
        k, v = attention.keys(x)
        k, v, seen = put_in_front(prefix, k, v, seen)
        seen, x = read_at(reads, seen, x)
        y = attention(x, k, v, seen, deterministic=deterministic)
        x = norm("attention_norm")(x + Dropout(c.dropout)(y, deterministic=deterministic))
        y = Mlp(c.mlp, c.activation, c.dtype, name="mlp")(x)
        if c.drops_mlp:
            y = Dropout(c.dropout)(y, deterministic=deterministic)
        return norm("mlp_norm")(x + y), None


class Embed(nn.Module):
    """Word, slot, position and segment embeddings, normalised and projected. -> [B, T, H]"""

    cfg: EncoderConfig

    def setup(self):
        """Declares the tables."""
        c = self.cfg
        self.word = Table(c.rows or c.vocab, c.embed, c.dtype)
        self.position = Table(c.positions, c.embed, c.dtype)
        self.type = Table(c.types, c.embed, c.dtype)
        self.norm = LayerNorm(c.eps)
        self.drop = Dropout(c.dropout)
        self.widens = c.projects or c.embed != c.width
        if self.widens:
            self.project = nn.Dense(c.width, dtype=c.dtype)

    def __call__(self, tokens, slots, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions."""
        x = self.word(tokens.ids)  # [B, T, E]
        # Before positions and norm: a soft token is embedded just as a word is.
        if slots is not None:
            x = write_slots(x, tokens.slot, slots)
        x = x + self.position(tokens.positions + self.cfg.offset) + self.type(tokens.types)
        x = constrain(x, "act_batch", None, None)
        x = self.drop(self.norm(x), deterministic=deterministic)
        return self.project(x) if self.widens else x  # [B, T, H]


class LmHead(nn.Module):
    """The transform before the output embedding. [..., H] -> [..., X]"""

    cfg: EncoderConfig

    def setup(self):
        """Declares the transform, the bias and an untied table."""
        c = self.cfg
        self.dense = nn.Dense(c.lm_width, dtype=c.dtype)
        self.norm = LayerNorm(c.eps)
        rows = c.rows or c.vocab
        self.bias = self.param("bias", nn.initializers.zeros, (rows,))
        if not c.tied:
            self.table = self.param("table", nn.initializers.normal(0.02), (rows, c.lm_width))

    def __call__(self, x):
        """Transforms hidden states."""
        return self.norm(ACTIVATIONS[self.cfg.lm_activation](self.dense(x)))


class RtdHead(nn.Module):
    """ELECTRA's replaced-token logit (Clark et al. 2020). [..., H] -> [...], > 0 means replaced"""

    cfg: EncoderConfig

    @nn.compact
    def __call__(self, x):
        """Scores positions."""
        c = self.cfg
        x = ACTIVATIONS[c.activation](nn.Dense(c.width, dtype=c.dtype, name="dense")(x))
        # Rounded to 16 bits, logits that differ would be equal.
        wide = functools.partial(dot_general, dtype=jnp.float32)
        return nn.Dense(1, dtype=c.dtype, dot_general=wide, name="out")(x)[..., 0]


class Encoder(nn.Module):
    """The encoder with every head in its checkpoint."""

    cfg: EncoderConfig
    STYLE: ClassVar[str] = "masked"
    EMBED: ClassVar[type[nn.Module]] = Embed
    LAYER: ClassVar[type[nn.Module]] = EncoderLayer
    LM: ClassVar[type[nn.Module]] = LmHead

    def setup(self):
        """Declares the parts in the checkpoint."""
        c = self.cfg
        self.embed = self.EMBED(c)
        self.layer = self.LAYER(c, parent=None)
        # Layers that share parameters are stored once.
        stored = max(c.takes) + 1 if c.takes else c.layers
        init = init_stack(self.layer, stored, jnp.zeros((1, 2, c.width)), *self.example())
        self.layers = declare(self, "layers", init)
        if "pooler" in c.model_heads:
            self.pooler = nn.Dense(c.width, dtype=c.dtype)
        if "mlm" in c.model_heads:
            self.mlm = self.LM(c)
        if "rtd" in c.model_heads:
            # A method is called `rtd`: the parameters keep that name, the attribute cannot.
            self.rtd_head = RtdHead(c, name="rtd")

    @nn.nowrap
    def example(self) -> tuple[Any, ...]:
        """Returns the other arguments of a layer, besides its input: a prefix and a mask."""
        return None, Seen(jnp.ones((1, 2), bool))

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need."""
        c = self.cfg
        head_dim = c.width // c.heads
        return Dims(c.vocab, c.width, c.embed, c.layers, c.heads, head_dim, c.positions - c.offset)

    @property
    def reads_prefix_positions(self) -> bool:
        """Whether the output depends on the positions of a prefix, `Prefix.positions`."""
        return False

    def __call__(self, batch: Batch, injection: Injection, *, deterministic: bool, reads=None):
        """Encodes a batch: [B, T, H], or [B, M, H] at the positions `reads` [B, M]."""
        slots, prefix, _ = injection.encoder
        if self.cfg.skip:
            x = take_kept(batch.kept, self.cfg.dtype)
        else:
            x = self.embed(batch.encoder, slots, deterministic=deterministic)
        # Positions of a prefix are those of a bias like T5's, which this stack does not add.
        prefix = prefix and prefix._replace(positions=None)
        return self._run(
            x, prefix, batch, deterministic, first=self.cfg.skip, reads=reads, fresh=slots is None
        )

    def enter(self, batch: Batch, layer: int):
        """Computes the input of a layer below which nothing is injected. -> [B, T, H]"""
        x = self.embed(batch.encoder, None, deterministic=True)
        return self._run(x, None, batch, True, last=layer)

    def words(self):
        """Returns the word embeddings. -> [V, E]"""
        return self.embed.word.table

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

    def init_all(self, batch: Batch):
        """Calls every part, so that `init` creates every parameter."""
        x = self(batch, Injection(), deterministic=True)
        parts = {"pooler": self.pool, "mlm": self.lm_features, "rtd": self.rtd}
        return [parts[name](x) for name in sorted(self.cfg.model_heads & parts.keys())]

    def _run(
        self, x, prefix: Prefix | None, batch: Batch, deterministic: bool, *, first: int = 0,
        last: int | None = None, reads=None, fresh: bool = False,
    ):  # fmt: skip
        seen = seen_of(batch.encoder, batch.encoder)
        return run_stack(
            self.layer, self.layers, x, prefix, seen, first=first, last=last, reads=reads,
            fresh=fresh, **self._way(deterministic),
        )[0]  # fmt: skip

    def _way(self, deterministic: bool) -> dict[str, Any]:
        c, drops = self.cfg, not deterministic and self.has_rng("dropout")
        return dict(
            stack=c.stack, remat=c.remat, takes=c.takes or None, deterministic=deterministic,
            key=self.make_rng("dropout") if drops else None,
        )  # fmt: skip


def config_from_hf(hf: Mapping[str, Any], **changes: Any) -> EncoderConfig:
    """Reads the dimensions from the fields of a transformers config.json.

    Raises:
      InputError: if the config needs a feature that this encoder does not support.
    """
    refuse_flags(hf, "is_decoder", "add_cross_attention", "is_encoder_decoder")
    read_word(hf, "position_embedding_type", "absolute", ("absolute",))
    activation = read_word(hf, "hidden_act", "gelu", ACTIVATIONS)
    width = read_size(hf, "hidden_size")
    config = EncoderConfig(
        vocab=read_size(hf, "vocab_size"),
        width=width,
        embed=width,
        layers=read_size(hf, "num_hidden_layers"),
        heads=read_size(hf, "num_attention_heads"),
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
    if width % config.heads:
        raise InputError(
            f"hidden_size={width} must be divisible by num_attention_heads={config.heads}"
        )
    return dataclasses.replace(config, **changes)


def make_config(hf: Mapping[str, Any], **changes: Any) -> EncoderConfig:
    """Reads a BERT config (also SciBERT, MiniLM)."""
    return config_from_hf(hf, **changes)


Backbone = Encoder
