"""GLM: one stack that reads a text with a blank bidirectionally, then fills it (Du et al. 2022).

Section 2 of the paper. The input is `Batch.encoder`, the text that fills the blank is
`Batch.decoder`. The input attends only to itself; the answer attends to the input and to its
earlier tokens. Each token has two positions: its position in the input, where tokens of the answer
have that of the blank, and its position in the answer, counted from 1, where tokens of the input
have 0.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.backbones import LanguageModel, read_width
from jaxprompt.backbones.gpt2 import GPT2Config, Layer
from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_positive,
    read_size,
    refuse_flags,
)
from jaxprompt.errors import InputError
from jaxprompt.layers.attention import bidirectional_mask, causal_mask
from jaxprompt.layers.cache import make_cache, show_token, step_layers
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, write_slots
from jaxprompt.layers.prefix import append_to_prefix
from jaxprompt.layers.stack import run_stack, stack_options
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import AttentionMask, Batch, Cache, Dims, Injection, Prefix, Role, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLMConfig(GPT2Config):
    """The dimensions of a GLM; `positions` are the rows of each position table."""


class Embed(nn.Module):
    """Word and slot embeddings, and the embeddings of both positions. -> [B, T, H]"""

    cfg: GLMConfig

    def setup(self):
        """Declares the tables."""
        cfg = self.cfg
        self.word = Table(cfg.rows or cfg.vocab, cfg.width, cfg.dtype)
        self.position = Table(cfg.positions, cfg.width, cfg.dtype)
        self.inner = Table(cfg.positions, cfg.width, cfg.dtype)
        self.drop = Dropout(cfg.embed_dropout)

    def __call__(self, ids, positions, inner, slot=None, slots=None, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions. int [B, T] x 4"""
        x = write_slots(self.word(ids), slot, slots)
        x = x + self.position(positions) + self.inner(inner)
        # In `extend` it is [B, H], a token of each row.
        if x.ndim == 3:
            x = constrain(x, "act_batch", None, None)
        return self.drop(x, deterministic=deterministic)


class Backbone(LanguageModel):
    """The stack and its word embeddings, which are also the output table."""

    cfg: GLMConfig
    STYLE: ClassVar[str] = "infilling"
    EMBED = Embed
    LAYER = Layer

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need."""
        # The table has one row more than the config's max_sequence_length.
        return super().dims._replace(max_len=self.cfg.positions - 1)

    def __call__(
        self, batch: Batch, injection: Injection, *, deterministic: bool, output_positions=None
    ):
        """Returns the states of the answer, or of the input if there is no answer. [B, T, H]

        Only at the positions `output_positions` [B, M] if given: [B, M, H].
        """
        has_answer = batch.decoder is not None
        input_positions = output_positions
        # The answer only reads keys and values of the input, not the last layer's output.
        if has_answer and output_positions is not None:
            input_positions = batch.label_pos[:, :1] * 0
        x, input_prefix = self._read_input(
            batch.encoder, injection, deterministic, output_positions=input_positions
        )
        if not has_answer:
            return self.norm(x)
        return self._run_answer(
            batch, input_prefix, deterministic, output_positions=output_positions
        )[0]

    def prefill(
        self, batch: Batch, injection: Injection, max_new_tokens: int, num_beams: int = 1
    ) -> tuple[Any, Cache]:
        """Processes the input and the given start of the answer, with room for more tokens.

        Returns the states of the answer [B, T, H], and the cache with the blank's `positions`.
        """
        self._check_length(batch.decoder_tokens.ids.shape[1] + max_new_tokens)
        # The input is a prefix to the answer, which sees all of it and is never seen by it.
        input_prefix = self._read_input(batch.encoder, injection, True)[1]
        x, (k, v) = self._run_answer(batch, input_prefix, True, return_kv=True)
        tokens = batch.decoder_tokens
        text = k, v, tokens.mask, tokens.positions
        cache = make_cache(input_prefix, *text, max_new_tokens, num_beams)
        blank = jnp.broadcast_to(find_blank(batch.encoder)[:, None], cache.positions.shape)
        return x, cache._replace(positions=blank)

    def extend(self, layers, ids, positions, cache: Cache, column) -> tuple[Any, Cache]:
        """Runs one more token of each beam through each of the `reading_layers`.

        int [B*K], int [B*K], int scalar -> its state [B*K, H], the cache
        """
        # All columns have the position of the blank, or 0 if they were added to the cache.
        blank = jnp.repeat(cache.positions.max(1), len(ids) // len(cache.positions))
        x = self.embed(ids, blank, positions + 1, deterministic=True)
        cache = show_token(cache, column)
        inputs = [(cache.visible, column)] * self.cfg.layers
        x, layer_caches = step_layers(self.layer, layers, x, cache.self_attention, inputs)
        return self.norm(x), cache._replace(self_attention=layer_caches)

    def _read_input(
        self, tokens: Tokens, injection: Injection, deterministic: bool, **options: Any
    ):
        """Reads the input. -> its states [B, T, H], its keys and values as a prefix"""
        slots, prefix, _ = injection.encoder
        no_inner = jnp.zeros_like(tokens.positions)
        x = self.embed(
            tokens.ids, tokens.positions, no_inner, tokens.slot, slots, deterministic=deterministic
        )
        prefix = prefix and prefix._replace(positions=None)
        mask = bidirectional_mask(tokens, tokens)
        x, (k, v) = self._run(x, prefix, mask, deterministic, frozen_input=slots is None, **options)
        return x, append_to_prefix(prefix, k, v, tokens.mask)

    def _run_answer(self, batch: Batch, input_prefix: Prefix, deterministic: bool, **options: Any):
        tokens = batch.decoder_tokens
        self._check_length(tokens.ids.shape[1])
        blank = jnp.broadcast_to(find_blank(batch.encoder)[:, None], tokens.ids.shape)
        x = self.embed(tokens.ids, blank, tokens.positions + 1, deterministic=deterministic)
        x, new_kv = self._run(x, input_prefix, causal_mask(tokens), deterministic, **options)
        return self.norm(x), new_kv

    def _check_length(self, length: int) -> None:
        # A position beyond the table would read its last row.
        max_length = self.cfg.positions - 1
        if length > max_length:
            raise InputError(
                f"an answer of up to {length} tokens exceeds the model's {max_length} positions; "
                "reduce data.max_target or generate.max_new_tokens"
            )

    def _run(
        self,
        x,
        prefix,
        mask: AttentionMask,
        deterministic: bool,
        return_kv: bool = True,
        **options: Any,
    ):
        return run_stack(
            self.layer,
            self.layers,
            x,
            prefix,
            mask,
            return_kv=return_kv,
            **stack_options(self, deterministic),
            **options,
        )


def find_blank(tokens: Tokens):
    """Finds the blank: the first position to predict, or the last position. -> int [B]"""
    last = jnp.max(jnp.where(tokens.mask, tokens.positions, 0), axis=1)
    is_label = tokens.mask & (tokens.roles == Role.LABEL)
    return jnp.min(jnp.where(is_label, tokens.positions, last[:, None]), axis=1)


def make_config(hf: Mapping[str, Any], **changes: Any) -> GLMConfig:
    """Reads a GLM config. Raises InputError if it needs an unsupported feature."""
    if not read_flag(hf, "block_position_encoding", False):
        raise InputError(
            "block_position_encoding=false is not supported: only the GLM of Du et al. (2022) with "
            "two position encodings is; use a checkpoint such as THUDM/glm-2b"
        )
    refuse_flags(hf, "relative_encoding")
    if hf.get("spell_length") is not None:
        raise InputError("spell_length is not supported; use a checkpoint with spell_length=null")
    if read_positive(hf, "attention_scale", 1.0) != 1.0:
        raise InputError(f"attention_scale={hf['attention_scale']} is not supported; it must be 1")
    width, heads = read_width(hf)
    config = GLMConfig(
        vocab=read_size(hf, "vocab_size"),
        width=width,
        layers=read_size(hf, "num_layers"),
        heads=heads,
        # GLM's configs have no field for it.
        mlp=4 * width,
        positions=read_size(hf, "max_sequence_length") + 1,
        eps=read_positive(hf, "layernorm_epsilon", 1e-5),
        embed_dropout=read_dropout(hf, "embedding_dropout_prob", 0.1),
        dropout=read_dropout(hf, "output_dropout_prob", 0.1),
        attention_dropout=read_dropout(hf, "attention_dropout_prob", 0.1),
    )
    return dataclasses.replace(config, **changes)
