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

from jaxprompt.backbones.gpt2 import GPT2Config, Layer
from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_positive,
    read_size,
    refuse_flags,
)
from jaxprompt.errors import InputError
from jaxprompt.layers.attention import seen_before, seen_of
from jaxprompt.layers.cache import remember, take_layers
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, output_bias, write_slots
from jaxprompt.layers.norm import LayerNorm
from jaxprompt.layers.prefix import put_behind
from jaxprompt.layers.quantized import restore_at
from jaxprompt.layers.stack import declare, init_stack, run_stack
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import Batch, Cache, Dims, Injection, Prefix, Role, Seen, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLMConfig(GPT2Config):
    """The dimensions of a GLM; `positions` are the rows of each position table."""


class Embed(nn.Module):
    """Word and slot embeddings, and the embeddings of both positions. -> [B, T, H]"""

    cfg: GLMConfig

    def setup(self):
        """Declares the tables."""
        c = self.cfg
        self.word = Table(c.rows or c.vocab, c.width, c.dtype)
        self.position = Table(c.positions, c.width, c.dtype)
        self.inner = Table(c.positions, c.width, c.dtype)
        self.drop = Dropout(c.embed_dropout)

    def __call__(self, ids, positions, inner, slot=None, slots=None, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions. int [B, T] x 4"""
        x = self.word(ids)
        if slots is not None:
            x = write_slots(x, slot, slots)
        x = x + self.position(positions) + self.inner(inner)
        # In `extend` it is [B, H], a token of each row.
        if x.ndim == 3:
            x = constrain(x, "act_batch", None, None)
        return self.drop(x, deterministic=deterministic)


class Backbone(nn.Module):
    """The stack and its word embeddings, which are also the output table."""

    cfg: GLMConfig
    STYLE: ClassVar[str] = "infilling"

    def setup(self):
        """Declares the parts in the checkpoint."""
        c = self.cfg
        x, seen = jnp.zeros((1, 2, c.width)), Seen(jnp.ones((1, 2), bool))
        self.embed = Embed(c)
        self.layer = Layer(c, parent=None)
        self.layers = declare(self, "layers", init_stack(self.layer, c.layers, x, None, seen))
        self.norm = LayerNorm(c.eps)

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need."""
        c = self.cfg
        head_dim = c.width // c.heads
        # The table has a row more than the config's max_sequence_length.
        return Dims(c.vocab, c.width, c.width, c.layers, c.heads, head_dim, c.positions - 1)

    @property
    def reads_prefix_positions(self) -> bool:
        """Whether the output depends on the positions of a prefix, `Prefix.positions`."""
        return False

    def __call__(self, batch: Batch, injection: Injection, *, deterministic: bool, reads=None):
        """Returns the states of the answer, or of the input if there is no answer. [B, T, H]

        Only at the positions `reads` [B, M] if given: [B, M, H].
        """
        answers = batch.decoder is not None
        # The answer sees the input's keys and values, which the last layer's output is not part of.
        own = batch.label_pos[:, :1] * 0 if answers and reads is not None else reads
        x, front = self._read(batch.encoder, injection, deterministic, reads=own)
        if not answers:
            return self.norm(x)
        return self._answer(batch, front, deterministic, reads=reads)[0]

    def prefill(self, batch: Batch, injection: Injection, room: int) -> tuple[Any, Cache]:
        """Processes the input and the given start of the answer, with room for more tokens.

        Returns the states of the answer [B, T, H], and the cache with the blank's `positions`.
        """
        self._check_room(batch.decoder_tokens.ids.shape[1] + room)
        # The input is a prefix to the answer, which sees all of it and is never seen by it.
        front = self._read(batch.encoder, injection, True)[1]
        x, (k, v) = self._answer(batch, front, True, keep=True)
        own = remember(front, k, v, batch.decoder_tokens.mask, room)
        blank = jnp.broadcast_to(find_blank(batch.encoder)[:, None], own[0].mask.shape)
        return x, Cache(own, blank)

    def reading_layers(self) -> Any:
        """Returns the layers for `cache.each_layer`, in a loop of `extend`."""
        return take_layers(self.layers, self.cfg.layers)

    def extend(self, layers, ids, positions, cache: Cache, column) -> tuple[Any, Cache]:
        """Runs one more token through each of the `reading_layers`.

        int [B], int [B], int scalar -> its state [B, H], the cache
        """
        # All columns have the position of the blank, so that of the first will do.
        x = self.embed(ids, cache.positions[:, 0], positions + 1, deterministic=True)
        own = []
        for params, memory in zip(layers, cache.own, strict=True):
            params = restore_at(params, x)
            x, memory = self.layer.apply({"params": params}, x, memory, column, method="step")
            own.append(memory)
        return self.norm(x), cache._replace(own=tuple(own))

    def words(self):
        """Returns the word embeddings. -> [V, H]"""
        return self.embed.word.table

    def lm_features(self, x):
        """Returns the states as they are. [..., H] -> [..., H]"""
        return x

    def lm_table(self):
        """Returns the word table and no bias, except that of padding. -> [V, H], None or [V]"""
        return self.words(), output_bias(self.words(), None, self.cfg.vocab)

    def init_all(self, batch: Batch):
        """Calls every part, so that `init` creates every parameter."""
        return self(batch, Injection(), deterministic=True)

    def _read(self, tokens: Tokens, injection: Injection, deterministic: bool, **how: Any):
        """Reads the input. -> its states [B, T, H], its keys and values as a prefix"""
        slots, prefix, _ = injection.encoder
        outside = jnp.zeros_like(tokens.positions)
        x = self.embed(
            tokens.ids, tokens.positions, outside, tokens.slot, slots, deterministic=deterministic
        )
        prefix = prefix and prefix._replace(positions=None)
        how = how | dict(fresh=slots is None)
        x, (k, v) = self._run(x, prefix, seen_of(tokens, tokens), deterministic, **how)
        return x, put_behind(prefix, k, v, tokens.mask)

    def _answer(self, batch: Batch, front: Prefix, deterministic: bool, **how: Any):
        tokens = batch.decoder_tokens
        self._check_room(tokens.ids.shape[1])
        blank = jnp.broadcast_to(find_blank(batch.encoder)[:, None], tokens.ids.shape)
        x = self.embed(tokens.ids, blank, tokens.positions + 1, deterministic=deterministic)
        x, kept = self._run(x, front, seen_before(tokens), deterministic, **how)
        return self.norm(x), kept

    def _check_room(self, length: int) -> None:
        # A position beyond the table would be taken for its last.
        most = self.cfg.positions - 1
        if length > most:
            raise InputError(
                f"an answer of up to {length} tokens exceeds the model's {most} positions; reduce "
                "data.max_target or generate.max_new_tokens"
            )

    def _run(self, x, prefix, seen: Seen, deterministic: bool, keep: bool = True, **how: Any):
        c, drops = self.cfg, not deterministic and self.has_rng("dropout")
        return run_stack(
            self.layer, self.layers, x, prefix, seen, stack=c.stack, remat=c.remat,
            key=self.make_rng("dropout") if drops else None, deterministic=deterministic, keep=keep,
            **how,
        )  # fmt: skip


def find_blank(tokens: Tokens):
    """Finds the blank: the first position to predict, or the last position. -> int [B]"""
    last = jnp.max(jnp.where(tokens.mask, tokens.positions, 0), axis=1)
    asked = tokens.mask & (tokens.roles == Role.LABEL)
    return jnp.min(jnp.where(asked, tokens.positions, last[:, None]), axis=1)


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
    width, heads = read_size(hf, "hidden_size"), read_size(hf, "num_attention_heads")
    if width % heads:
        raise InputError(f"hidden_size={width} must be divisible by num_attention_heads={heads}")
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
