"""T5 in all its versions: 1.0, 1.1, LM-adapted, flan, mT5 (Raffel et al. 2020; Shazeer 2020).

Attention has no 1 / sqrt(D): it is folded into the initial values of the query projection. Norms,
softmax and logits are float32 with any dtype of the weights.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_positive,
    read_size,
    refuse_flags,
)
from jaxprompt.convert.shapes import feed_forward_type
from jaxprompt.errors import InputError, brief
from jaxprompt.layers.attention import Attention, put_in_front, read_at, seen_before, seen_of
from jaxprompt.layers.cache import place, remember, take_layers, write, write_positions
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, output_bias, write_slots
from jaxprompt.layers.mlp import ACTIVATIONS, GatedMlp
from jaxprompt.layers.norm import RMSNorm
from jaxprompt.layers.quantized import restore_at
from jaxprompt.layers.relpos import RelativeBias, at_queries, of_own
from jaxprompt.layers.stack import declare, init_stack, run_stack, take_kept
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import NO_LIMIT, Batch, Cache, Dims, Injection, Memory, Prefix, Seen


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The dimensions of a T5 and how it is run."""

    vocab: int
    width: int
    layers: int
    decoder_layers: int
    heads: int
    head_dim: int
    mlp: int
    buckets: int = 32
    max_distance: int = 128
    activation: str = "relu"
    gated: bool = False
    eps: float = 1e-6
    dropout: float = 0.1
    attention_dropout: float = 0.1
    scaled_output: bool = True  # features are multiplied by 1 / sqrt(H) before the output table
    start: int = 0  # the id that the decoder is fed first
    rescale: float = 1.0  # what the residual stream is divided by, see convert/load.py
    types: int = 1
    model_heads: frozenset[str] = frozenset({"lm"})
    tied: bool = True  # the output table is the word table
    dtype: Any = jnp.float32
    stack: str = "unroll"
    remat: str = "none"
    attention: str = "auto"
    rows: int = 0  # of the vocabulary tables, padding included; 0 = vocab
    skip: int = 0  # the encoder's layers below this one are not run: Batch.kept is what enters it


def _attention(c: T5Config) -> Attention:
    return Attention(
        c.width, c.heads, c.head_dim, c.attention_dropout, c.attention, c.dtype, 1.0, use_bias=False
    )


class EncoderLayer(nn.Module):
    """One pre-norm layer. [B, T, H] -> [B, T, H]"""

    cfg: T5Config

    def setup(self):
        """Declares the parts."""
        c = self.cfg
        self.attention = _attention(c)
        self.mlp = GatedMlp(c.mlp, c.activation, c.gated, c.dropout, c.dtype)
        self.attention_norm, self.mlp_norm = RMSNorm(c.eps), RMSNorm(c.eps)
        self.drop = Dropout(c.dropout)

    def __call__(self, x, prefix: Prefix | None, seen: Seen, bias, *, deterministic: bool):
        """Runs the layer."""
        y = self.attention_norm(x)
        k, v = self.attention.keys(y)
        k, v, seen = put_in_front(prefix, k, v, seen)
        y = self.attention(y, k, v, seen, of_own(bias, k), deterministic=deterministic)
        x = x + self.drop(y, deterministic=deterministic)
        y = self.mlp(self.mlp_norm(x), deterministic=deterministic)
        return x + self.drop(y, deterministic=deterministic), None


class DecoderLayer(nn.Module):
    """One pre-norm layer that also attends to the encoder's output. [B, T, H] -> [B, T, H]"""

    cfg: T5Config

    def setup(self):
        """Declares the parts."""
        c = self.cfg
        self.attention, self.cross = _attention(c), _attention(c)
        self.mlp = GatedMlp(c.mlp, c.activation, c.gated, c.dropout, c.dtype)
        self.attention_norm, self.cross_norm = RMSNorm(c.eps), RMSNorm(c.eps)
        self.mlp_norm = RMSNorm(c.eps)
        self.drop = Dropout(c.dropout)

    def __call__(
        self, x, prefixes, seen: Seen, bias, source, source_seen: Seen, *, deterministic: bool,
        keep: bool = False, reads=None,
    ):  # fmt: skip
        """Runs the layer, only at the positions `reads` [B, M] if given.

        keep=True also returns the k, v of both attentions, without prefixes.
        """
        own, cross = prefixes
        y = self.attention_norm(x)
        stream_k, stream_v = self.attention.keys(y)
        k, v, seen = put_in_front(own, stream_k, stream_v, seen)
        seen, x, y = read_at(reads, seen, x, y)
        bias = at_queries(reads, of_own(bias, k))
        y = self.attention(y, k, v, seen, bias, deterministic=deterministic)
        x = x + self.drop(y, deterministic=deterministic)
        cross_k, cross_v = self.cross.keys(source)
        k, v, seen = put_in_front(cross, cross_k, cross_v, source_seen)
        (seen,) = read_at(reads, seen)
        # Without a bias: T5 has one for a stream's attention to itself alone.
        y = self.cross(self.cross_norm(x), k, v, seen, deterministic=deterministic)
        x = x + self.drop(y, deterministic=deterministic)
        y = self.mlp(self.mlp_norm(x), deterministic=deterministic)
        x = x + self.drop(y, deterministic=deterministic)
        return x, (stream_k, stream_v, cross_k, cross_v) if keep else None

    def step(self, x, own: Memory, cross: Memory, bias, column):
        """Runs the layer on one more token. [B, H] -> [B, H], the memory with the token

        `cross` has B rows, or fewer: then as many consecutive rows share a source.
        """
        y = self.attention_norm(x)
        k, v = self.attention.keys(y)
        own = write(own, k, v, column)
        x = x + self.attention.recall(y, own, bias)
        x = x + self.cross.recall(self.cross_norm(x), cross)
        return x + self.mlp(self.mlp_norm(x), deterministic=True), own


class Embed(nn.Module):
    """Word embeddings and slots. -> [B, T, H]"""

    cfg: T5Config

    def setup(self):
        """Declares the table."""
        c = self.cfg
        self.word = Table(c.rows or c.vocab, c.width, c.dtype)
        self.drop = Dropout(c.dropout)

    def __call__(self, tokens, slots, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions."""
        x = self.word(tokens.ids)
        if slots is not None:
            x = write_slots(x, tokens.slot, slots)
        x = constrain(x, "act_batch", None, None)
        return self.drop(x, deterministic=deterministic)


class Backbone(nn.Module):
    """Encoder, decoder and output table."""

    cfg: T5Config
    STYLE: ClassVar[str] = "seq2seq"

    def setup(self):
        """Declares the parts in the checkpoint."""
        c = self.cfg
        x, seen = jnp.zeros((1, 2, c.width)), Seen(jnp.ones((1, 2), bool))
        self.embed = Embed(c)
        self.layer = EncoderLayer(c, parent=None)
        self.layers = declare(self, "layers", init_stack(self.layer, c.layers, x, None, seen, None))
        self.decoder_layer = DecoderLayer(c, parent=None)
        example = (x, (None, None), seen, None, x, seen)
        init = init_stack(self.decoder_layer, c.decoder_layers, *example)
        self.decoder_layers = declare(self, "decoder_layers", init)
        shape = (c.buckets, c.max_distance, c.heads)
        # One table serves all layers of a stack (Raffel et al. 2020, section 2.1).
        self.bias, self.decoder_bias = RelativeBias(*shape, True), RelativeBias(*shape, False)
        self.norm, self.decoder_norm = RMSNorm(c.eps), RMSNorm(c.eps)
        self.drop = Dropout(c.dropout)
        if not c.tied:
            self.lm = Table(c.rows or c.vocab, c.width, c.dtype)

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need."""
        c = self.cfg
        return Dims(
            c.vocab, c.width, c.width, c.layers, c.heads, c.head_dim, NO_LIMIT, c.decoder_layers
        )

    @property
    def reads_prefix_positions(self) -> bool:
        """Whether the output depends on the positions of a prefix, `Prefix.positions`."""
        return True

    def __call__(self, batch: Batch, injection: Injection, *, deterministic: bool, reads=None):
        """Encodes and decodes a batch. -> the decoder's states [B, T, H]

        Only at its positions `reads` [B, M] if given: [B, M, H].
        """
        source = self.encode(batch, injection, deterministic=deterministic)
        tokens = batch.decoder_tokens
        x, bias = self._start(tokens, injection, deterministic)
        prefixes = _bare(injection.decoder.prefix), _bare(injection.cross.prefix)
        x, _ = self._decode(
            x, prefixes, seen_before(tokens), bias, source, seen_of(tokens, batch.encoder),
            deterministic=deterministic, reads=reads,
        )  # fmt: skip
        return x

    def encode(self, batch: Batch, injection: Injection, *, deterministic: bool):
        """Runs the encoder. -> [B, T, H]"""
        slots, prefix, _ = injection.encoder
        if self.cfg.skip:
            x = take_kept(batch.kept, self.cfg.dtype)
        else:
            x = self.embed(batch.encoder, slots, deterministic=deterministic)
        how = dict(first=self.cfg.skip, fresh=slots is None)
        x = self._encode(x, prefix, batch, deterministic, **how)
        return self.drop(self.norm(x), deterministic=deterministic)

    def enter(self, batch: Batch, layer: int):
        """Computes the input of an encoder layer, or the output, with nothing injected below it.

        -> [B, T, H]
        """
        x = self.embed(batch.encoder, None, deterministic=True)
        return self._encode(x, None, batch, True, last=layer)

    def prefill(self, batch: Batch, injection: Injection, room: int) -> tuple[Any, Cache]:
        """Encodes the input and processes the decoder's first tokens, with room for more.

        Returns the decoder's states [B, T, H] and the cache.
        """
        tokens = batch.decoder_tokens
        source = self.encode(batch, injection, deterministic=True)
        x, bias = self._start(tokens, injection, True)
        own, cross = injection.decoder.prefix, injection.cross.prefix
        x, (k, v, cross_k, cross_v) = self._decode(
            x, (_bare(own), _bare(cross)), seen_before(tokens), bias, source,
            seen_of(tokens, batch.encoder), deterministic=True, keep=True,
        )  # fmt: skip
        seen = remember(cross, cross_k, cross_v, batch.encoder.mask)
        mine = remember(own, k, v, tokens.mask, room)
        return x, Cache(mine, place(own, tokens.positions, room), seen)

    def reading_layers(self) -> Any:
        """Returns the layers for `cache.each_layer`, in a loop of `extend`."""
        return take_layers(self.decoder_layers, self.cfg.decoder_layers)

    def extend(self, layers, ids, positions, cache: Cache, column) -> tuple[Any, Cache]:
        """Runs one more token through each of the `reading_layers`.

        int [B], int [B], int scalar -> its state [B, H], the cache
        """
        x, own = self.embed.word(ids), []
        # Before the bias is looked up: the token sees itself, at distance 0.
        cache = write_positions(cache, positions, column)
        bias = self.decoder_bias(positions[:, None], cache.positions)[:, :, 0]  # [B, N, S]
        for params, memory, cross in zip(layers, cache.own, cache.cross or (), strict=True):
            x, memory = self.decoder_layer.apply(
                {"params": restore_at(params, x)}, x, memory, cross, bias, column, method="step"
            )
            own.append(memory)
        return self.decoder_norm(x), cache._replace(own=tuple(own))

    def words(self):
        """Returns the word embeddings. -> [V, H]"""
        return self.embed.word.table

    def lm_features(self, x):
        """Scales the decoder's states for the output table. [..., H] -> [..., H]"""
        c = self.cfg
        factor = c.width**-0.5 if c.scaled_output else 1.0
        # A tied table is divided with the stream; as the output table it must not be.
        return x * (factor * c.rescale if c.tied else factor)

    def lm_table(self):
        """Returns the output table and no bias, except that of padding. -> [V, H], None or [V]"""
        table = self.words() if self.cfg.tied else self.lm.table
        return table, output_bias(table, None, self.cfg.vocab)

    def init_all(self, batch: Batch):
        """Calls every part, so that `init` creates every parameter."""
        return self(batch, Injection(), deterministic=True), self.lm_table()

    def _encode(self, x, prefix: Prefix | None, batch: Batch, deterministic: bool, **span: int):
        tokens = batch.encoder
        # Distances in a text are those of columns: one table of them serves all rows.
        columns = jnp.arange(tokens.ids.shape[1])[None]
        bias = self.bias(columns, columns)  # [1, N, T, T]
        places = tokens.positions
        # Those of a text are the same for all rows, unless a row has several documents or prompts.
        is_packed = tokens.segments is not None
        shares_positions = tokens.lengths is not None and not is_packed and batch.prompt is None
        if prefix is not None and shares_positions:
            # Those of padding do not matter.
            places = columns + prefix.k.shape[2]
        bias = self._with_front(self.bias, bias, places, prefix)
        return run_stack(
            self.layer, self.layers, x, _bare(prefix), seen_of(tokens, tokens), bias, **span,
            **self._way(deterministic),
        )[0]  # fmt: skip

    def _start(self, tokens, injection: Injection, deterministic: bool):
        """Embeds the decoder's tokens and tabulates their bias. -> [B, T, H], [B, N, T, P+T]"""
        slots, prefix, _ = injection.decoder
        bias = self.decoder_bias(tokens.positions, tokens.positions)
        bias = self._with_front(self.decoder_bias, bias, tokens.positions, prefix)
        return self.embed(tokens, slots, deterministic=deterministic), bias

    def _with_front(self, table, bias, positions, prefix: Prefix | None):
        """Puts the bias of a prefix in front. [B|1, N, T, S] -> [B|1, N, T, P+S]"""
        if prefix is None:
            return bias
        length = prefix.k.shape[2]
        # Outside of the relative bias a prefix has 0.
        if prefix.positions is None:
            return jnp.pad(bias, [(0, 0)] * 3 + [(length, 0)])
        front = table(positions, prefix.positions[None])  # [B|1, N, T, P]
        own = jnp.broadcast_to(bias, (*front.shape[:3], bias.shape[3]))
        return jnp.concatenate([front, own], axis=-1)

    def _decode(self, x, prefixes, seen, bias, source, source_seen, *, deterministic, **how: Any):
        x, kept = run_stack(
            self.decoder_layer, self.decoder_layers, x, prefixes, seen, bias, source, source_seen,
            **how, **self._way(deterministic),
        )  # fmt: skip
        return self.drop(self.decoder_norm(x), deterministic=deterministic), kept

    def _way(self, deterministic: bool) -> dict[str, Any]:
        c, drops = self.cfg, not deterministic and self.has_rng("dropout")
        return dict(
            stack=c.stack, remat=c.remat, deterministic=deterministic,
            key=self.make_rng("dropout") if drops else None,
        )  # fmt: skip


def _bare(prefix: Prefix | None) -> Prefix | None:
    """Takes out what has no axis of layers."""
    return prefix and prefix._replace(positions=None)


def make_config(hf: Mapping[str, Any], **changes: Any) -> T5Config:
    """Reads a T5 or mT5 config. Raises InputError if it needs an unsupported feature."""
    gate, _, act = feed_forward_type(hf).rpartition("-")
    act = "gelu_new" if gate and act == "gelu" else act  # as T5 1.1 was trained
    if gate not in ("", "gated") or act not in ACTIVATIONS:
        raise InputError(
            f"feed_forward_proj={brief(hf['feed_forward_proj'])} is not supported; use one of "
            f"{', '.join(ACTIVATIONS)}, optionally with the prefix gated-"
        )
    refuse_flags(hf, "is_decoder")
    if not read_flag(hf, "is_encoder_decoder", True):
        raise InputError("is_encoder_decoder=false is not supported; use a full T5")
    layers = read_size(hf, "num_layers")
    start = hf.get("decoder_start_token_id")
    start = hf.get("pad_token_id") if start is None else start
    if type(start) is not int or not 0 <= start < read_size(hf, "vocab_size"):
        state = "lacks decoder_start_token_id"
        if start is not None:
            state = f"has decoder_start_token_id={brief(start)}"
        raise InputError(
            f"the config {state}, which must be a token id of its vocabulary, the decoder's first "
            "input; set it in config.json (T5 uses the pad id, 0)"
        )
    rate = read_dropout(hf, "dropout_rate", 0.1)
    eps = read_positive(hf, "layer_norm_epsilon", 1e-6)
    rescale = changes.get("rescale", 1.0)
    buckets = read_size(hf, "relative_attention_num_buckets", 32)
    distance = read_size(hf, "relative_attention_max_distance", 128)
    # Below 4 no bucket of a side is exact, and the formula divides by how many are.
    if buckets < 4 or not buckets // 2 < distance < 2**20:
        raise InputError(
            f"relative_attention_num_buckets={buckets} and relative_attention_max_distance="
            f"{distance} are invalid: the first must be at least 4, the second above half of the "
            "first and below 2**20; give the config.json that was saved with the weights"
        )
    # Checkpoints of T5 1.1 say tie_word_embeddings=false and thereby mean unscaled features; those
    # of mT5 are never scaled, and say tied once transformers 5 has saved them.
    scaled = hf.get("model_type") != "mt5" and read_flag(hf, "tie_word_embeddings", True)
    scaled = read_flag(hf, "scale_decoder_outputs", scaled)
    config = T5Config(
        vocab=read_size(hf, "vocab_size"), width=read_size(hf, "d_model"), layers=layers,
        decoder_layers=read_size(hf, "num_decoder_layers", layers),
        heads=read_size(hf, "num_heads"), head_dim=read_size(hf, "d_kv"), mlp=read_size(hf, "d_ff"),
        buckets=buckets,
        max_distance=distance,
        activation=act,
        gated=bool(gate),
        eps=eps / rescale**2,  # of the mean square of a stream that is divided
        # T5 has one rate for hidden states and probabilities.
        dropout=rate,
        attention_dropout=rate,
        scaled_output=scaled,
        start=start,
        tied=read_flag(hf, "tie_word_embeddings", True),
    )  # fmt: skip
    return dataclasses.replace(config, **changes)
