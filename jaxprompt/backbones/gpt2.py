"""GPT-2: a pre-norm decoder with learned positions (Radford et al. 2019)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
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
from jaxprompt.layers.attention import Attention, put_in_front, read_at, seen_before
from jaxprompt.layers.cache import place, remember, take_layers, write, write_positions
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, output_bias, write_slots
from jaxprompt.layers.mlp import ACTIVATIONS, Mlp
from jaxprompt.layers.norm import LayerNorm
from jaxprompt.layers.prefix import put_behind
from jaxprompt.layers.quantized import restore_at
from jaxprompt.layers.stack import declare, init_stack, run_stack, take_kept
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import Batch, Cache, Dims, Injection, Memory, Prefix, Seen, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The fields that all decoder configs share."""

    vocab: int
    width: int
    layers: int
    heads: int
    mlp: int
    positions: int
    types: int = 1
    model_heads: frozenset[str] = frozenset({"lm"})
    tied: bool = True  # the output table is the word table
    dtype: Any = jnp.float32
    stack: str = "unroll"
    remat: str = "none"
    attention: str = "auto"
    rows: int = 0  # of the vocabulary tables, padding included; 0 = vocab
    skip: int = 0  # layers below this one are not run: Batch.kept is what enters it


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(DecoderConfig):
    """The dimensions of a GPT-2; `positions` are the rows of the position table."""

    activation: str = "gelu_new"
    scaled_attention: bool = True
    eps: float = 1e-5
    embed_dropout: float = 0.1
    dropout: float = 0.1
    attention_dropout: float = 0.1


class Layer(nn.Module):
    """One pre-norm layer. [B, T, H] -> [B, T, H]"""

    cfg: GPT2Config

    def setup(self):
        """Declares the parts."""
        c = self.cfg
        scale = None if c.scaled_attention else 1.0
        head_dim = c.width // c.heads
        self.attention = Attention(
            c.width, c.heads, head_dim, c.attention_dropout, c.attention, c.dtype, scale
        )
        self.mlp = Mlp(c.mlp, c.activation, c.dtype)
        self.attention_norm, self.mlp_norm = LayerNorm(c.eps), LayerNorm(c.eps)
        self.drop = Dropout(c.dropout)

    def __call__(
        self, x, prefix: Prefix | None, seen: Seen, *, deterministic: bool, keep: bool = False,
        reads=None,
    ):  # fmt: skip
        """Runs the layer, only at the positions `reads` [B, M] if given.

        keep=True also returns its k, v, without the prefix.
        """
        y = self.attention_norm(x)
        # Kept without the prefix, which `remember` puts in front.
        stream_k, stream_v = self.attention.keys(y)
        k, v, seen = put_in_front(prefix, stream_k, stream_v, seen)
        seen, x, y = read_at(reads, seen, x, y)
        y = self.attention(y, k, v, seen, deterministic=deterministic)
        x = x + self.drop(y, deterministic=deterministic)
        y = self.mlp(self.mlp_norm(x))
        return x + self.drop(y, deterministic=deterministic), (stream_k, stream_v) if keep else None

    def step(self, x, own: Memory, column):
        """Runs the layer on one more token. [B, H] -> [B, H], the memory with the token"""
        y = self.attention_norm(x)
        k, v = self.attention.keys(y)
        own = write(own, k, v, column)
        x = x + self.attention.recall(y, own)
        return x + self.mlp(self.mlp_norm(x)), own


class Embed(nn.Module):
    """Word, slot and position embeddings. -> [B, T, H]"""

    cfg: GPT2Config

    def setup(self):
        """Declares the tables."""
        c = self.cfg
        self.word = Table(c.rows or c.vocab, c.width, c.dtype)
        self.position = Table(c.positions, c.width, c.dtype)
        self.drop = Dropout(c.embed_dropout)

    def __call__(self, ids, positions, slot=None, slots=None, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions. int [B, T] x 3"""
        x = self.word(ids)
        if slots is not None:
            x = write_slots(x, slot, slots)
        x = x + self.position(positions)
        # In `extend` it is [B, H], a token of each row.
        if x.ndim == 3:
            x = constrain(x, "act_batch", None, None)
        return self.drop(x, deterministic=deterministic)


class Decoder(nn.Module):
    """The computations of a decoder and its output table; subclasses declare parts in `setup`."""

    cfg: DecoderConfig
    STYLE: ClassVar[str] = "causal"

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need."""
        c = self.cfg
        return Dims(c.vocab, c.width, c.width, c.layers, c.heads, c.width // c.heads, c.positions)

    @property
    def reads_prefix_positions(self) -> bool:
        """Whether the output depends on the positions of a prefix, `Prefix.positions`."""
        return False

    def __call__(self, batch: Batch, injection: Injection, *, deterministic: bool, reads=None):
        """Returns the states of a batch, [B, T, H], or only at `reads` [B, M], [B, M, H]."""
        return self._read(batch, injection, deterministic=deterministic, reads=reads)[0]

    def enter(self, batch: Batch, layer: int):
        """Computes the input of a layer below which nothing is injected. -> [B, T, H]"""
        tokens = batch.encoder
        x = self.embed(tokens.ids, tokens.positions, deterministic=True)
        return self._run(x, None, tokens, True, last=layer)[0]

    @property
    def shares_front(self) -> bool:
        """Whether `read_front` is supported: not with windows, which would drop the shared keys."""
        return not self.reads_prefix_positions

    def read_front(self, tokens: Tokens, injection: Injection, *, deterministic: bool) -> Prefix:
        """Returns the keys and values of the shared prefix, after those of the method's prefix."""
        # Of the last layer these alone are wanted, so that it runs at one position.
        first = jnp.zeros((len(tokens.ids), 1), jnp.int32)
        batch = Batch(tokens, None, None, None, None)
        _, (k, v) = self._read(
            batch, injection, deterministic=deterministic, keep=True, reads=first
        )
        return put_behind(injection.encoder.prefix, k, v, np.ones(tokens.ids.shape, bool))

    def prefill(self, batch: Batch, injection: Injection, room: int) -> tuple[Any, Cache]:
        """Processes the input, with room for more tokens. -> states [B, T, H], the cache"""
        tokens, prefix = batch.encoder, injection.encoder.prefix
        x, (k, v) = self._read(batch, injection, deterministic=True, keep=True)
        own = remember(prefix, k, v, tokens.mask, room)
        return x, Cache(own, place(prefix, tokens.positions, room))

    def reading_layers(self) -> Any:
        """Returns the layers for `cache.each_layer`, in a loop of `extend`."""
        return take_layers(self.layers, self.cfg.layers)

    def extend(self, layers, ids, positions, cache: Cache, column) -> tuple[Any, Cache]:
        """Runs one more token through each of the `reading_layers`.

        int [B], int [B], int scalar -> its state [B, H], the cache
        """
        x, own = self.embed(ids, positions, deterministic=True), []
        for params, memory in zip(layers, cache.own, strict=True):
            params = restore_at(params, x)
            x, memory = self.layer.apply({"params": params}, x, memory, column, method="step")
            own.append(memory)
        return self.norm(x), write_positions(cache._replace(own=tuple(own)), positions, column)

    def words(self):
        """Returns the word embeddings. -> [V, H]"""
        return self.embed.word.table

    def lm_features(self, x):
        """Returns the states as they are. [..., H] -> [..., H]"""
        return x

    def lm_table(self):
        """Returns the output table and no bias, except that of padding. -> [V, H], None or [V]"""
        table = self.words() if self.cfg.tied else self.lm.table
        return table, output_bias(table, None, self.cfg.vocab)

    def init_all(self, batch: Batch):
        """Calls every part, so that `init` creates every parameter."""
        return self(batch, Injection(), deterministic=True), self.lm_table()

    def _read(self, batch: Batch, injection: Injection, *, deterministic: bool, **how: Any):
        tokens, (slots, prefix, _) = batch.encoder, injection.encoder
        if self.cfg.skip:
            x = take_kept(batch.kept, self.cfg.dtype)
        else:
            x = self.embed(
                tokens.ids, tokens.positions, tokens.slot, slots, deterministic=deterministic
            )
        prefix = prefix and prefix._replace(positions=None)
        how = how | dict(first=self.cfg.skip, fresh=slots is None)
        x, kept = self._run(x, prefix, tokens, deterministic, **how)
        return self.norm(x), kept

    def _run(self, x, prefix: Prefix | None, tokens: Tokens, deterministic: bool, **how: Any):
        c, drops = self.cfg, not deterministic and self.has_rng("dropout")
        return run_stack(
            self.layer, self.layers, x, prefix, seen_before(tokens), stack=c.stack, remat=c.remat,
            key=self.make_rng("dropout") if drops else None, deterministic=deterministic, **how,
        )  # fmt: skip


class Backbone(Decoder):
    """The decoder and its output table."""

    cfg: GPT2Config

    def setup(self):
        """Declares the parts in the checkpoint."""
        c = self.cfg
        x, seen = jnp.zeros((1, 2, c.width)), Seen(jnp.ones((1, 2), bool))
        self.embed = Embed(c)
        self.layer = Layer(c, parent=None)
        self.layers = declare(self, "layers", init_stack(self.layer, c.layers, x, None, seen))
        self.norm = LayerNorm(c.eps)
        if not c.tied:
            self.lm = Table(c.rows or c.vocab, c.width, c.dtype)


def make_config(hf: Mapping[str, Any], **changes: Any) -> GPT2Config:
    """Reads a GPT-2 config. Raises InputError if it needs an unsupported feature."""
    act = read_word(hf, "activation_function", "gelu_new", ACTIVATIONS)
    refuse_flags(hf, "scale_attn_by_inverse_layer_idx", "add_cross_attention", "is_encoder_decoder")
    width, heads = read_size(hf, "n_embd"), read_size(hf, "n_head")
    if width % heads:
        raise InputError(f"n_embd={width} must be divisible by n_head={heads}")
    config = GPT2Config(
        vocab=read_size(hf, "vocab_size"),
        width=width,
        layers=read_size(hf, "n_layer"),
        heads=heads,
        mlp=read_size(hf, "n_inner", 4 * width),
        positions=read_size(hf, "n_positions"),
        activation=act,
        scaled_attention=read_flag(hf, "scale_attn_weights", True),
        eps=read_positive(hf, "layer_norm_epsilon", 1e-5),
        embed_dropout=read_dropout(hf, "embd_pdrop", 0.1),
        dropout=read_dropout(hf, "resid_pdrop", 0.1),
        attention_dropout=read_dropout(hf, "attn_pdrop", 0.1),
        tied=read_flag(hf, "tie_word_embeddings", True),
    )
    return dataclasses.replace(config, **changes)
