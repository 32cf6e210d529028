"""The Llama family: pre-norm decoders with rotary positions and gated MLPs (Touvron et al. 2023).

Model types: llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text. A prefix is like past keys
in transformers: it is not rotated, the text follows it, and in local layers it leaves the window as
the text continues. With prompt.shift=False it is outside of windows, and all tokens see it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.backbones.gpt2 import Decoder, DecoderConfig
from jaxprompt.convert.hf_config import (
    read_dropout,
    read_positive,
    read_size,
    read_tied,
    refuse_flags,
)
from jaxprompt.convert.llama_fields import (
    LAYER_TYPES,
    read_activation,
    read_biases,
    read_cap,
    read_heads,
    read_positions,
    read_type,
    read_windows,
)
from jaxprompt.convert.rope import RotaryParams, read_rotary
from jaxprompt.errors import InputError
from jaxprompt.layers.attention import put_in_front, read_at, seen_before
from jaxprompt.layers.cache import write, write_positions
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, output_bias, write_slots
from jaxprompt.layers.mlp import GatedMlp
from jaxprompt.layers.norm import RMSNorm
from jaxprompt.layers.quantized import QuantizedTable, restore_at
from jaxprompt.layers.rotary import RotaryAttention, make_turns, turn
from jaxprompt.layers.stack import declare, init_stack, run_stack, take_kept
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import Batch, Cache, Dims, Injection, Memory, Prefix, Seen, Tokens, Window


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The dimensions of a Llama and how it is run."""

    key_heads: int  # heads of keys and values
    head_dim: int
    turnings: tuple[RotaryParams, ...]  # of global and of local layers
    is_local: tuple[bool, ...]  # of each layer
    window: int = 0  # how many tokens one of a local layer sees, itself included
    activation: str = "silu"
    eps: float = 1e-6
    scale: float | None = None  # of the scores, None = 1 / sqrt(head_dim)
    biases: frozenset[str] = frozenset()  # of llama_fields.read_biases
    head_norms: bool = False
    sandwich: bool = False  # norms behind the attention and the MLP too
    norm_offset: float = 0.0  # a norm multiplies by this + its scale
    embed_scale: float = 1.0
    cap: float = 0.0  # of the scores, 0 = none
    logit_cap: float = 0.0
    embed_dropout: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def norm(self, **name: Any) -> RMSNorm:
        """Makes a norm."""
        return RMSNorm(self.eps, self.norm_offset, **name)


class HeadNormed(RotaryAttention):
    """Rotary attention whose queries and keys are normalised before rotation."""

    eps: float = 1e-6
    offset: float = 0.0

    def setup(self):
        """Declares the projections and the norms."""
        super().setup()
        self.query_norm = RMSNorm(self.eps, self.offset)
        self.key_norm = RMSNorm(self.eps, self.offset)

    def keys(self, x, turns):
        """Projects what is attended to. [B, S, H] -> k, v [B, S, G, D]"""
        return turn(self.key_norm(self.key(x)), turns), self.value(x)

    def queries(self, x, turns):
        """Projects what attends. [B, T, H] -> [B, T, N, D]"""
        return turn(self.query_norm(self.query(x)), turns)


class Item(NamedTuple):
    """The inputs of one layer besides its parameters; leaves have a leading axis of layers."""

    prefix: Prefix | None
    is_local: Any  # bool


class Layer(nn.Module):
    """One pre-norm layer. [B, T, H] -> [B, T, H]"""

    cfg: LlamaConfig

    def setup(self):
        """Declares the parts."""
        c = self.cfg
        form, how = RotaryAttention, {}
        if c.head_norms:
            form, how = HeadNormed, dict(eps=c.eps, offset=c.norm_offset)
        self.attention = form(
            c.width, c.heads, c.head_dim, c.attention_dropout, c.attention, c.dtype, c.scale,
            use_bias="qkv" in c.biases, out_bias="out" in c.biases, key_heads=c.key_heads,
            cap=c.cap, **how,
        )  # fmt: skip
        self.mlp = GatedMlp(c.mlp, c.activation, True, 0.0, c.dtype, "mlp" in c.biases)
        self.attention_norm, self.mlp_norm = c.norm(), c.norm()
        if c.sandwich:
            self.behind_attention_norm, self.behind_mlp_norm = c.norm(), c.norm()
        self.drop = Dropout(c.dropout)

    def __call__(
        self, x, item: Item, seen: Seen, places, turns, *, deterministic: bool, keep: bool = False,
        reads=None,
    ):  # fmt: skip
        """Runs the layer, only at the positions `reads` [B, M] if given.

        keep=True also returns its k, v, without the prefix. places: int [B, T]; turns: rotations of
        global and of local layers
        """
        own = self._choose(item.is_local, turns)
        y = self.attention_norm(x)
        stream_k, stream_v = self.attention.keys(y, own)
        k, v, seen = put_in_front(item.prefix, stream_k, stream_v, seen)
        seen = self._narrow(seen, item, places)
        seen, x, y, own = read_at(reads, seen, x, y, own)
        y = self.attention(y, k, v, seen, own, deterministic=deterministic)
        x = x + self._behind("attention", y, deterministic)
        y = self.mlp(self.mlp_norm(x), deterministic=deterministic)
        return x + self._behind("mlp", y, deterministic), (stream_k, stream_v) if keep else None

    def step(self, x, own: Memory, column, is_local: bool, position, columns, turns):
        """Runs the layer on one more token. [B, H] -> [B, H], the memory with the token

        position: int [B]; columns: int [B, S], the positions of the memory
        """
        # Known when tracing: a global layer's step has no window to compute.
        turns = turns[int(is_local)]
        y = self.attention_norm(x)[:, None]
        k, v = self.attention.keys(y, turns)
        own = write(own, k[:, 0], v[:, 0], column)
        mask = own.mask
        if is_local:
            near = columns > position[:, None] - self.cfg.window
            here = jnp.arange(mask.shape[1]) == column
            # `columns` has the new token's place after the last layer only, so its own column is
            # named here. A place below 0 is that of a prefix outside of windows.
            mask = mask & (near | (columns < 0) | here)
        q = self.attention.queries(y, turns)[:, 0]
        y = self.attention.recall_from(q, own._replace(mask=mask))
        x = x + self._behind("attention", y, True)
        y = self.mlp(self.mlp_norm(x), deterministic=True)
        return x + self._behind("mlp", y, True), own

    def _behind(self, part: str, y, deterministic: bool):
        if self.cfg.sandwich:
            y = getattr(self, f"behind_{part}_norm")(y)
        return self.drop(y, deterministic=deterministic)

    def _choose(self, is_local, turns):
        """Takes the turns of a layer's kind; where all are of one kind nothing is chosen."""
        if len(set(self.cfg.is_local)) == 1:
            return turns[int(self.cfg.is_local[0])]
        return jax.tree.map(lambda a, b: jnp.where(is_local, b, a), *turns)

    def _narrow(self, seen: Seen, item: Item, places) -> Seen:
        """Hides what is out of a local layer's window."""
        c, where = self.cfg, None if item.prefix is None else item.prefix.positions
        length = 0 if item.prefix is None else item.prefix.k.shape[1]
        outside = length if where is None else 0  # of windows: nothing of it is hidden
        size = places.shape[1]  # no number in a program of any length, which masks in any case
        fits = isinstance(size, int) and size + length - outside <= c.window
        if fits or not any(c.is_local):
            return seen
        hidden = places[:, None, :] <= places[:, :, None] - c.window  # [B, T, T]
        if length:
            front = jnp.zeros((*places.shape, length), bool)
            if where is not None:
                front = where <= places[:, :, None] - c.window
            hidden = jnp.concatenate([front, hidden], axis=-1)
        mask = seen.mask if seen.mask.ndim == 3 else seen.mask[:, None]
        narrow = Seen(mask & ~(hidden & item.is_local))
        if seen.lengths is None:
            return narrow
        # Columns are as far from each other as positions, so a kernel needs no mask of the window.
        local = True if all(c.is_local) else item.is_local
        window = Window(c.window, local, outside)
        return narrow._replace(keys=seen.keys, causal=True, window=window)


class Embed(nn.Module):
    """Word and slot embeddings. -> [B, T, H]"""

    cfg: LlamaConfig

    def setup(self):
        """Declares the table."""
        c = self.cfg
        self.word = Table(c.rows or c.vocab, c.width, c.dtype)
        self.drop = Dropout(c.embed_dropout)

    def __call__(self, ids, slot=None, slots=None, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions. int [B, T] x 2"""
        c = self.cfg
        x = self.word(ids)
        # Before the slots are written: rows start from `words`, which are scaled already.
        if c.embed_scale != 1.0:
            # Rounded to the type first, as transformers does: in bfloat16 sqrt(3072) becomes 55.5.
            x = x * jnp.asarray(c.embed_scale, c.dtype)
        if slots is not None:
            x = write_slots(x, slot, slots)
        # In `extend` it is [B, H], a token of each row.
        if x.ndim == 3:
            x = constrain(x, "act_batch", None, None)
        return self.drop(x, deterministic=deterministic)


class Backbone(Decoder):
    """The decoder and its output table."""

    cfg: LlamaConfig

    def setup(self):
        """Declares the parts in the checkpoint."""
        c = self.cfg
        self.embed = Embed(c)
        self.layer = Layer(c, parent=None)
        x, places = jnp.zeros((1, 2, c.width)), jnp.zeros((1, 2), jnp.int32)
        example = Item(None, False), Seen(jnp.ones((1, 2), bool)), places, self._turns(places)
        self.layers = declare(self, "layers", init_stack(self.layer, c.layers, x, *example))
        self.norm = c.norm()
        if not c.tied:
            self.lm = Table(c.rows or c.vocab, c.width, c.dtype)

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need; heads are key-value heads."""
        c = self.cfg
        return Dims(c.vocab, c.width, c.width, c.layers, c.key_heads, c.head_dim, c.positions)

    @property
    def reads_prefix_positions(self) -> bool:
        """Whether the output depends on the positions of a prefix, `Prefix.positions`."""
        return any(self.cfg.is_local)

    def enter(self, batch: Batch, layer: int):
        """Computes the input of a layer below which nothing is injected. -> [B, T, H]"""
        tokens = batch.encoder
        x = self.embed(tokens.ids, deterministic=True)
        return self._run(x, None, tokens, True, last=layer)[0]

    def extend(self, layers, ids, positions, cache: Cache, column) -> tuple[Any, Cache]:
        """Runs one more token through each of the `reading_layers`.

        int [B], int [B], int scalar -> its state [B, H], the cache
        """
        x, own = self.embed(ids, deterministic=True), []
        turns = self._turns(positions[:, None])
        kinds = self.cfg.is_local
        for params, memory, is_local in zip(layers, cache.own, kinds, strict=True):
            x, memory = self.layer.apply(
                {"params": restore_at(params, x)}, x, memory, column, is_local, positions,
                cache.positions, turns, method="step",
            )  # fmt: skip
            own.append(memory)
        return self.norm(x), write_positions(cache._replace(own=tuple(own)), positions, column)

    def words(self):
        """Returns the word embeddings as they enter the first layer. -> [V, H]"""
        table, scale = self.embed.word.table, self.cfg.embed_scale
        if scale == 1.0:
            return table
        # A quantized table is multiplied as it is looked up.
        return table * (
            scale if isinstance(table, QuantizedTable) else jnp.asarray(scale, table.dtype)
        )

    def lm_table(self):
        """Returns the output table and no bias, except that of padding. -> [V, H], None or [V]"""
        # Unscaled, unlike `words`: as an output table Gemma's is multiplied as it is.
        table = self.embed.word.table if self.cfg.tied else self.lm.table
        return table, output_bias(table, None, self.cfg.vocab)

    @nn.nowrap
    def _turns(self, positions):
        return tuple(
            make_turns(positions, np.array(t.frequencies), t.scale) for t in self.cfg.turnings
        )

    def _read(self, batch: Batch, injection: Injection, *, deterministic: bool, **how: Any):
        tokens, (slots, prefix, _) = batch.encoder, injection.encoder
        if self.cfg.skip:
            x = take_kept(batch.kept, self.cfg.dtype)
        else:
            x = self.embed(tokens.ids, tokens.slot, slots, deterministic=deterministic)
        how = how | dict(first=self.cfg.skip, fresh=slots is None)
        x, kept = self._run(x, prefix, tokens, deterministic, **how)
        return self.norm(x), kept

    def _run(self, x, prefix: Prefix | None, tokens: Tokens, deterministic: bool, **how: Any):
        c, drops = self.cfg, not deterministic and self.has_rng("dropout")
        if prefix is not None and prefix.positions is not None:
            self.check_shift(prefix.k.shape[2])
            # `run_stack` takes leaves apart by their axis of layers, which positions lack.
            spread = jnp.broadcast_to(prefix.positions, (c.layers, *prefix.positions.shape))
            prefix = prefix._replace(positions=spread)
        items = Item(prefix, np.array(c.is_local))
        return run_stack(
            self.layer, self.layers, x, items, seen_before(tokens), tokens.positions,
            self._turns(tokens.positions), stack=c.stack, remat=c.remat,
            key=self.make_rng("dropout") if drops else None, deterministic=deterministic, **how,
        )  # fmt: skip

    @nn.nowrap
    def check_shift(self, length: int) -> None:
        """Raises InputError for a prefix that takes enough positions to fill a window."""
        c = self.cfg
        if any(c.is_local) and length >= c.window:
            raise InputError(
                f"a prefix of {length} tokens does not fit the window of {c.window} tokens of this "
                f"model's local layers; use prompt.length below {c.window}, or prompt.shift=False"
            )


def make_config(hf: Mapping[str, Any], **changes: Any) -> LlamaConfig:
    """Reads a config. Raises InputError if it needs an unsupported feature."""
    name, kind = read_type(hf)
    refuse_flags(hf, "use_bidirectional_attention", "add_cross_attention", "is_encoder_decoder")
    heads, key_heads, size = read_heads(hf)
    layers = read_size(hf, "num_hidden_layers")
    is_local, window = read_windows(hf, name, layers)
    width = read_size(hf, "hidden_size")
    positions = read_positions(hf)
    # Gemma 2 and 3 name their scale, and it need not be that of the head's width.
    scale = read_positive(hf, "query_pre_attn_scalar", 256.0) ** -0.5 if kind.sandwich else None
    config = LlamaConfig(
        vocab=read_size(hf, "vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        key_heads=key_heads,
        head_dim=size,
        mlp=read_size(hf, "intermediate_size"),
        positions=positions,
        turnings=_read_turnings(hf, name, size, positions),
        is_local=is_local,
        window=window,
        activation=read_activation(hf),
        eps=read_positive(hf, "rms_norm_eps", 1e-6),
        scale=scale,
        biases=read_biases(hf),
        head_norms=kind.head_norms,
        sandwich=kind.sandwich,
        norm_offset=float(kind.gemma),
        # Gemma multiplies embeddings by sqrt(H), as Vaswani et al. 2017, section 3.4, do.
        embed_scale=width**0.5 if kind.gemma else 1.0,
        cap=read_cap(hf, "attn_logit_softcapping", 50.0),
        logit_cap=read_cap(hf, "final_logit_softcapping", 30.0),
        attention_dropout=read_dropout(hf, "attention_dropout", 0.0),
        tied=read_tied(hf, "llama"),
    )
    return dataclasses.replace(config, **changes)


def _read_turnings(hf: Mapping[str, Any], name: str, size: int, positions: int):
    if name != "gemma3_text":
        return (read_rotary(hf, size, positions),) * 2
    bases = 1e6, 1e4  # of global and of local layers, where the config names none
    pairs = zip(LAYER_TYPES, bases, strict=True)
    return tuple(read_rotary(hf, size, positions, kind=k, theta=theta) for k, theta in pairs)
