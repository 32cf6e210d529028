"""GPT-2: a pre-norm decoder with learned positions (Radford et al. 2019)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.backbones import LanguageModel, read_width
from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_positive,
    read_size,
    read_word,
    refuse_flags,
)
from jaxprompt.layers.attention import Attention, causal_mask, prepend_prefix, select_queries
from jaxprompt.layers.cache import (
    make_cache,
    show_token,
    step_layers,
    write_position,
    write_token,
)
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, write_slots
from jaxprompt.layers.mlp import ACTIVATIONS, Mlp
from jaxprompt.layers.norm import LayerNorm
from jaxprompt.layers.prefix import append_to_prefix
from jaxprompt.layers.stack import read_cached_states, run_stack, stack_options
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import AttentionMask, Batch, Cache, Injection, LayerCache, Prefix, Tokens


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
    skip: int = 0  # the first layer to run, whose input is Batch.cached


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(DecoderConfig):
    """The dimensions of a GPT-2."""

    position_offset: int = 0  # rows of the position table before that of position 0
    activation: str = "gelu_new"
    scaled_attention: bool = True
    eps: float = 1e-5
    embed_dropout: float = 0.1
    dropout: float = 0.1
    attention_dropout: float = 0.1

    def norm(self) -> LayerNorm:
        """Makes a norm."""
        return LayerNorm(self.eps)


class Layer(nn.Module):
    """One pre-norm layer. [B, T, H] -> [B, T, H]"""

    cfg: GPT2Config

    def setup(self):
        """Declares the parts."""
        cfg = self.cfg
        scale = None if cfg.scaled_attention else 1.0
        head_dim = cfg.width // cfg.heads
        self.attention = Attention(
            cfg.width, cfg.heads, head_dim, cfg.attention_dropout, cfg.attention, cfg.dtype, scale
        )
        self.mlp = Mlp(cfg.mlp, cfg.activation, cfg.dtype, recomputed=cfg.remat == "mlp")
        self.attention_norm, self.mlp_norm = cfg.norm(), cfg.norm()
        self.drop = Dropout(cfg.dropout)

    def __call__(
        self,
        x,
        prefix: Prefix | None,
        mask: AttentionMask,
        *,
        deterministic: bool,
        return_kv: bool = False,
        output_positions=None,
    ):
        """Runs the layer, only at the positions `output_positions` [B, M] if given.

        return_kv=True also returns its k, v, without the prefix: `make_layer_caches` prepends it.
        """
        y = self.attention_norm(x)
        text_k, text_v = self.attention.keys(y)
        k, v, mask = prepend_prefix(prefix, text_k, text_v, mask)
        mask, x, y = select_queries(output_positions, mask, x, y)
        y = self.attention(y, k, v, mask, deterministic=deterministic)
        x = x + self.drop(y, deterministic=deterministic)
        y = self.mlp(self.mlp_norm(x))
        kv = (text_k, text_v) if return_kv else None
        return x + self.drop(y, deterministic=deterministic), kv

    def step(self, x, layer_cache: LayerCache, visible, column):
        """Runs the layer on one more token. [B*K, H] -> [B*K, H], the cache with the token

        visible: bool [B, K, S], the columns of each beam's new tokens.
        """
        y = self.attention_norm(x)
        k, v = self.attention.keys(y)
        layer_cache = write_token(layer_cache, k, v, column)
        mask = layer_cache.mask[:, None] | visible
        x = x + self.attention.attend_cached(y, layer_cache, mask)
        return x + self.mlp(self.mlp_norm(x)), layer_cache


class Embed(nn.Module):
    """Word, slot and position embeddings. -> [B, T, H]"""

    cfg: GPT2Config

    def setup(self):
        """Declares the tables."""
        cfg = self.cfg
        self.word = Table(cfg.rows or cfg.vocab, cfg.width, cfg.dtype)
        self.position = Table(cfg.positions + cfg.position_offset, cfg.width, cfg.dtype)
        self.drop = Dropout(cfg.embed_dropout)

    def __call__(self, ids, positions, slot=None, slots=None, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions. int [B, T] x 3"""
        if self.cfg.position_offset:
            positions = positions + self.cfg.position_offset
        x = write_slots(self.word(ids), slot, slots) + self.position(positions)
        # In `extend` x is [B, H], one token of each row.
        if x.ndim == 3:
            x = constrain(x, "act_batch", None, None)
        return self.drop(x, deterministic=deterministic)


class Decoder(LanguageModel):
    """The computations of a decoder."""

    cfg: DecoderConfig
    STYLE: ClassVar[str] = "causal"

    def __call__(
        self, batch: Batch, injection: Injection, *, deterministic: bool, output_positions=None
    ):
        """Returns the states of a batch: [B, T, H], or [B, M, H] at `output_positions` [B, M]."""
        options = dict(deterministic=deterministic, output_positions=output_positions)
        return self._read(batch, injection, **options)[0]

    def enter(self, batch: Batch, layer: int):
        """Computes the input of a layer below which nothing is injected. -> [B, T, H]"""
        tokens = batch.encoder
        x = self.embed(tokens.ids, tokens.positions, deterministic=True)
        return self._run(x, None, tokens, True, last=layer)[0]

    @property
    def supports_shared_prefix(self) -> bool:
        """Whether `encode_shared_prefix` is supported: not with windows, which would hide it."""
        return not self.reads_prefix_positions

    def encode_shared_prefix(
        self, tokens: Tokens, injection: Injection, *, deterministic: bool
    ) -> Prefix:
        """Returns the keys and values of the shared prefix, after those of the method's prefix."""
        # The states of the last layer are not needed: it runs at only one position.
        first_position = jnp.zeros((len(tokens.ids), 1), jnp.int32)
        batch = Batch(tokens, None, None, None, None)
        _, (k, v) = self._read(
            batch,
            injection,
            deterministic=deterministic,
            return_kv=True,
            output_positions=first_position,
        )
        return append_to_prefix(injection.encoder.prefix, k, v, np.ones(tokens.ids.shape, bool))

    def prefill(
        self, batch: Batch, injection: Injection, max_new_tokens: int, num_beams: int = 1
    ) -> tuple[Any, Cache]:
        """Processes the input, with room for more tokens. -> states [B, T, H], the cache"""
        tokens, prefix = batch.encoder, injection.encoder.prefix
        x, (k, v) = self._read(batch, injection, deterministic=True, return_kv=True)
        text = k, v, tokens.mask, tokens.positions
        return x, make_cache(prefix, *text, max_new_tokens, num_beams)

    def extend(self, layers, ids, positions, cache: Cache, column) -> tuple[Any, Cache]:
        """Runs one more token of each beam through each of the `reading_layers`.

        int [B*K], int [B*K], int scalar -> its state [B*K, H], the cache
        """
        x = self.embed(ids, positions, deterministic=True)
        cache = write_position(show_token(cache, column), positions, column)
        inputs = self._step_inputs(positions, cache, column)
        x, layer_caches = step_layers(self.layer, layers, x, cache.self_attention, inputs)
        return self.norm(x), cache._replace(self_attention=layer_caches)

    def _step_inputs(self, positions, cache: Cache, column) -> list[tuple[Any, ...]]:
        """Returns the other arguments of each layer's `step`."""
        return [(cache.visible, column)] * self.cfg.layers

    def _read(self, batch: Batch, injection: Injection, *, deterministic: bool, **options: Any):
        tokens, (slots, prefix, _) = batch.encoder, injection.encoder
        if self.cfg.skip:
            x = read_cached_states(batch.cached, self.cfg.dtype)
        else:
            x = self.embed(
                tokens.ids, tokens.positions, tokens.slot, slots, deterministic=deterministic
            )
        options = options | dict(first=self.cfg.skip, frozen_input=slots is None)
        x, layer_kv = self._run(x, prefix, tokens, deterministic, **options)
        return self.norm(x), layer_kv

    def _run(self, x, prefix: Prefix | None, tokens: Tokens, deterministic: bool, **options: Any):
        prefix = prefix and prefix._replace(positions=None)
        return run_stack(
            self.layer,
            self.layers,
            x,
            prefix,
            causal_mask(tokens),
            **stack_options(self, deterministic),
            **options,
        )


class Backbone(Decoder):
    """The decoder and its output table."""

    cfg: GPT2Config
    EMBED = Embed
    LAYER = Layer


def make_config(hf: Mapping[str, Any], **changes: Any) -> GPT2Config:
    """Reads a GPT-2 config. Raises InputError if it needs an unsupported feature."""
    act = read_word(hf, "activation_function", "gelu_new", ACTIVATIONS)
    refuse_flags(hf, "scale_attn_by_inverse_layer_idx", "add_cross_attention", "is_encoder_decoder")
    width, heads = read_width(hf, "n_embd", "n_head")
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
