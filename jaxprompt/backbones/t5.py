"""T5 in all its versions: 1.0, 1.1, LM-adapted, flan, mT5 (Raffel et al. 2020; Shazeer 2020).

Attention has no 1 / sqrt(D): it is folded into the initial values of the query projection. Norms,
softmax and logits are float32 with any dtype of the weights.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.backbones import LanguageModel
from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_id,
    read_positive,
    read_size,
    refuse_flags,
)
from jaxprompt.convert.shapes import feed_forward_type
from jaxprompt.errors import InputError, brief
from jaxprompt.layers.attention import (
    Attention,
    bidirectional_mask,
    causal_mask,
    prepend_prefix,
    select_queries,
)
from jaxprompt.layers.cache import (
    decoding_layers,
    make_cache,
    make_layer_caches,
    show_token,
    step_layers,
    write_position,
    write_token,
)
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, write_slots
from jaxprompt.layers.mlp import ACTIVATIONS, GatedMlp
from jaxprompt.layers.norm import RMSNorm
from jaxprompt.layers.relpos import RelativeBias, select_bias, without_prefix
from jaxprompt.layers.stack import (
    declare_param,
    init_stack,
    read_cached_states,
    run_stack,
    stack_options,
)
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import (
    NO_LIMIT,
    AttentionMask,
    Batch,
    Cache,
    Dims,
    Injection,
    LayerCache,
    Prefix,
)


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
    start: int = 0  # id of the decoder's first input
    rescale: float = 1.0  # divides the residual stream, see convert/load.py
    types: int = 1
    model_heads: frozenset[str] = frozenset({"lm"})
    tied: bool = True  # the output table is the word table
    dtype: Any = jnp.float32
    stack: str = "unroll"
    remat: str = "none"
    attention: str = "auto"
    rows: int = 0  # of the vocabulary tables, padding included; 0 = vocab
    skip: int = 0  # the first encoder layer to run, whose input is Batch.cached
    positions: ClassVar[int] = NO_LIMIT
    pre_norm: ClassVar[bool] = True  # norms are before the blocks of a layer, not after the sums

    def norm(self) -> RMSNorm:
        """Makes a norm."""
        return RMSNorm(self.eps)

    def make_attention(self) -> Attention:
        """Makes an attention without scale and biases."""
        return Attention(
            self.width,
            self.heads,
            self.head_dim,
            self.attention_dropout,
            self.attention,
            self.dtype,
            1.0,
            use_bias=False,
        )

    def make_mlp(self) -> GatedMlp:
        """Makes a feed-forward block."""
        return GatedMlp(
            self.mlp,
            self.activation,
            self.gated,
            self.dropout,
            self.dtype,
            recomputed=self.remat == "mlp",
        )


class EncoderLayer(nn.Module):
    """One layer, with the parts that its config makes. [B, T, H] -> [B, T, H]"""

    cfg: Any

    def setup(self):
        """Declares the parts."""
        cfg = self.cfg
        self.attention, self.mlp = cfg.make_attention(), cfg.make_mlp()
        self.attention_norm, self.mlp_norm = cfg.norm(), cfg.norm()
        self.drop = Dropout(cfg.dropout)

    def _enter(self, norm, x):
        """Returns the input of a block."""
        return norm(x) if self.cfg.pre_norm else x

    def _add(self, norm, x, y, deterministic: bool):
        """Adds the output of a block to its input."""
        x = x + self.drop(y, deterministic=deterministic)
        return x if self.cfg.pre_norm else norm(x)

    def __call__(self, x, prefix: Prefix | None, mask: AttentionMask, bias, *, deterministic: bool):
        """Runs the layer."""
        y = self._enter(self.attention_norm, x)
        k, v = self.attention.keys(y)
        k, v, mask = prepend_prefix(prefix, k, v, mask)
        y = self.attention(y, k, v, mask, without_prefix(bias, k), deterministic=deterministic)
        x = self._add(self.attention_norm, x, y, deterministic)
        y = self.mlp(self._enter(self.mlp_norm, x), deterministic=deterministic)
        return self._add(self.mlp_norm, x, y, deterministic), None


class DecoderLayer(EncoderLayer):
    """One layer that also attends to the encoder's output. [B, T, H] -> [B, T, H]"""

    def setup(self):
        """Declares the parts."""
        super().setup()
        self.cross, self.cross_norm = self.cfg.make_attention(), self.cfg.norm()

    def __call__(  # type: ignore[override]  # `run_stack` calls each kind as it is
        self,
        x,
        prefixes,
        mask: AttentionMask,
        bias,
        encoder_states,
        encoder_mask: AttentionMask,
        *,
        deterministic: bool,
        return_kv: bool = False,
        output_positions=None,
    ):
        """Runs the layer, only at the positions `output_positions` [B, M] if given.

        return_kv=True also returns the k, v of both attentions, without prefixes.
        """
        prefix, cross_prefix = prefixes
        y = self._enter(self.attention_norm, x)
        text_k, text_v = self.attention.keys(y)
        k, v, mask = prepend_prefix(prefix, text_k, text_v, mask)
        mask, x, y = select_queries(output_positions, mask, x, y)
        bias = select_bias(output_positions, without_prefix(bias, k))
        y = self.attention(y, k, v, mask, bias, deterministic=deterministic)
        x = self._add(self.attention_norm, x, y, deterministic)
        y = self._enter(self.cross_norm, x)
        # Without a bias: T5 only has one for self-attention.
        needs_keys = return_kv or cross_prefix is not None
        if needs_keys or not self.cross.is_faster_without_keys(y.shape[1], encoder_states.shape[1]):
            cross_k, cross_v = self.cross.keys(encoder_states)
            k, v, mask = prepend_prefix(cross_prefix, cross_k, cross_v, encoder_mask)
            (mask,) = select_queries(output_positions, mask)
            y = self.cross(y, k, v, mask, deterministic=deterministic)
        else:
            (mask,) = select_queries(output_positions, encoder_mask)
            y = self.cross.attend_to_source(y, encoder_states, mask, deterministic=deterministic)
        x = self._add(self.cross_norm, x, y, deterministic)
        y = self.mlp(self._enter(self.mlp_norm, x), deterministic=deterministic)
        x = self._add(self.mlp_norm, x, y, deterministic)
        return x, (text_k, text_v, cross_k, cross_v) if return_kv else None

    def step(self, x, layer_cache: LayerCache, cross: LayerCache, bias, visible, column):
        """Runs the layer on one more token. [B*K, H] -> [B*K, H], the cache with the token

        bias: [B, N, 1, S] or None; visible: bool [B, K, S], the columns of each beam's new tokens.
        """
        y = self._enter(self.attention_norm, x)
        k, v = self.attention.keys(y)
        layer_cache = write_token(layer_cache, k, v, column)
        mask = layer_cache.mask[:, None] | visible
        y = self.attention.attend_cached(y, layer_cache, mask, bias)
        x = self._add(self.attention_norm, x, y, True)
        y = self._enter(self.cross_norm, x)
        y = self.cross.attend_cached(y, cross, cross.mask[:, None])
        x = self._add(self.cross_norm, x, y, True)
        y = self.mlp(self._enter(self.mlp_norm, x), deterministic=True)
        return self._add(self.mlp_norm, x, y, True), layer_cache


class Embed(nn.Module):
    """Word embeddings and slots. -> [B, T, H]"""

    cfg: T5Config

    def setup(self):
        """Declares the table."""
        cfg = self.cfg
        self.word = Table(cfg.rows or cfg.vocab, cfg.width, cfg.dtype)
        self.drop = Dropout(cfg.dropout)

    def __call__(self, tokens, slots, *, deterministic: bool, decodes: bool = False):
        """Embeds tokens, with slot vectors at their positions; both streams alike."""
        x = write_slots(self.word(tokens.ids), tokens.slot, slots)
        x = constrain(x, "act_batch", None, None)
        return self.drop(x, deterministic=deterministic)

    def embed_token(self, ids, positions):
        """Embeds one token of each row of the decoder. int [B] x 2 -> [B, H]"""
        return self.word(ids)


class EncoderDecoder(LanguageModel):
    """The computations of an encoder and a decoder, without norms after the last layers."""

    cfg: Any
    STYLE: ClassVar[str] = "seq2seq"

    def setup(self):
        """Declares the parts in the checkpoint."""
        cfg = self.cfg
        x, mask = jnp.zeros((1, 2, cfg.width)), AttentionMask(jnp.ones((1, 2), bool))
        self.embed = self.EMBED(cfg)
        self.layer = EncoderLayer(cfg, parent=None)
        init = init_stack(self.layer, cfg.layers, x, None, mask, None)
        self.layers = declare_param(self, "layers", init)
        self.decoder_layer = DecoderLayer(cfg, parent=None)
        example = (x, (None, None), mask, None, x, mask)
        init = init_stack(self.decoder_layer, cfg.decoder_layers, *example)
        self.decoder_layers = declare_param(self, "decoder_layers", init)
        if not cfg.tied:
            self.lm = Table(cfg.rows or cfg.vocab, cfg.width, cfg.dtype)

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need."""
        return super().dims._replace(decoder_layers=self.cfg.decoder_layers)

    def __call__(
        self, batch: Batch, injection: Injection, *, deterministic: bool, output_positions=None
    ):
        """Encodes and decodes a batch. -> the decoder's states [B, T, H]

        Only at its positions `output_positions` [B, M] if given: [B, M, H].
        """
        encoder_states = self.encode(batch, injection, deterministic=deterministic)
        tokens = batch.decoder_tokens
        x, bias = self._embed_decoder(tokens, injection, deterministic)
        prefixes = injection.decoder.prefix, injection.cross.prefix
        x, _ = self._decode(
            x,
            prefixes,
            tokens,
            bias,
            encoder_states,
            batch.encoder,
            deterministic=deterministic,
            output_positions=output_positions,
        )
        return x

    def encode(self, batch: Batch, injection: Injection, *, deterministic: bool):
        """Runs the encoder. -> [B, T, H]"""
        slots, prefix, _ = injection.encoder
        if self.cfg.skip:
            x = read_cached_states(batch.cached, self.cfg.dtype)
        else:
            x = self.embed(batch.encoder, slots, deterministic=deterministic)
        options = dict(first=self.cfg.skip, frozen_input=slots is None)
        x = self._encode(x, prefix, batch, deterministic, **options)
        return self._finish(x, deterministic)

    def enter(self, batch: Batch, layer: int):
        """Computes the input of an encoder layer, or the output, with nothing injected below it.

        -> [B, T, H]
        """
        x = self.embed(batch.encoder, None, deterministic=True)
        return self._encode(x, None, batch, True, last=layer)

    def prefill(
        self, batch: Batch, injection: Injection, max_new_tokens: int, num_beams: int = 1
    ) -> tuple[Any, Cache]:
        """Encodes the input and processes the decoder's first tokens, with room for more.

        Returns the decoder's states [B, T, H] and the cache.
        """
        tokens = batch.decoder_tokens
        encoder_states = self.encode(batch, injection, deterministic=True)
        x, bias = self._embed_decoder(tokens, injection, True)
        prefix, cross_prefix = injection.decoder.prefix, injection.cross.prefix
        x, (k, v, cross_k, cross_v) = self._decode(
            x,
            (prefix, cross_prefix),
            tokens,
            bias,
            encoder_states,
            batch.encoder,
            deterministic=True,
            return_kv=True,
        )
        cross_caches = make_layer_caches(cross_prefix, cross_k, cross_v, batch.encoder.mask)
        text = k, v, tokens.mask, tokens.positions
        return x, make_cache(prefix, *text, max_new_tokens, num_beams, cross_caches)

    def reading_layers(self) -> Any:
        """Returns the layers for `cache.iterate_layers`, in a loop of `extend`."""
        return decoding_layers(self.decoder_layers, self.cfg.decoder_layers)

    def extend(self, layers, ids, positions, cache: Cache, column) -> tuple[Any, Cache]:
        """Runs one more token of each beam through each of the `reading_layers`.

        int [B*K], int [B*K], int scalar -> its state [B*K, H], the cache
        """
        x = self.embed.embed_token(ids, positions)
        # Before the bias is computed: the token sees itself, at distance 0.
        cache = write_position(show_token(cache, column), positions, column)
        # The beams of a row are equally long.
        row_positions = positions.reshape(len(cache.positions), -1)[:, :1]
        bias = self._token_bias(row_positions, cache)
        inputs = [(cross, bias, cache.visible, column) for cross in cache.cross or ()]
        x, layer_caches = step_layers(self.decoder_layer, layers, x, cache.self_attention, inputs)
        return self._finish_decoder(x, True), cache._replace(self_attention=layer_caches)

    def _encoder_bias(self, batch: Batch, prefix: Prefix | None):
        """Computes the bias of the encoder's attention. -> [B|1, N, T, P+T] or None"""

    def _decoder_bias(self, positions, prefix: Prefix | None):
        """Computes the bias of the decoder's self-attention. -> [B, N, T, P+T] or None"""

    def _token_bias(self, positions, cache: Cache):
        """Computes the bias of each row's next token. int [B, 1] -> [B, N, 1, S] or None"""

    def _finish(self, x, deterministic: bool):
        """Computes the encoder's output from that of its last layer."""
        return x

    def _finish_decoder(self, x, deterministic: bool):
        """Computes the decoder's output from that of its last layer."""
        return x

    def _encode(
        self, x, prefix: Prefix | None, batch: Batch, deterministic: bool, **layer_range: int
    ):
        return run_stack(
            self.layer,
            self.layers,
            x,
            _without_positions(prefix),
            bidirectional_mask(batch.encoder, batch.encoder),
            self._encoder_bias(batch, prefix),
            **layer_range,
            **stack_options(self, deterministic),
        )[0]

    def _embed_decoder(self, tokens, injection: Injection, deterministic: bool):
        """Embeds the decoder's tokens. -> [B, T, H], the bias [B, N, T, P+T] or None"""
        slots, prefix, _ = injection.decoder
        x = self.embed(tokens, slots, deterministic=deterministic, decodes=True)
        return x, self._decoder_bias(tokens.positions, prefix)

    def _decode(
        self,
        x,
        prefixes,
        tokens,
        bias,
        encoder_states,
        encoder_tokens,
        *,
        deterministic,
        **options: Any,
    ):
        x, layer_kv = run_stack(
            self.decoder_layer,
            self.decoder_layers,
            x,
            tuple(map(_without_positions, prefixes)),
            causal_mask(tokens),
            bias,
            encoder_states,
            bidirectional_mask(tokens, encoder_tokens),
            **options,
            **stack_options(self, deterministic),
        )
        return self._finish_decoder(x, deterministic), layer_kv


class Backbone(EncoderDecoder):
    """The encoder, the decoder and the output table of a T5."""

    cfg: T5Config
    EMBED = Embed

    def setup(self):
        """Declares the parts in the checkpoint."""
        super().setup()
        cfg = self.cfg
        shape = (cfg.buckets, cfg.max_distance, cfg.heads)
        # One table serves all layers of a stack (Raffel et al. 2020, section 2.1).
        self.bias, self.decoder_bias = RelativeBias(*shape, True), RelativeBias(*shape, False)
        self.norm, self.decoder_norm = cfg.norm(), cfg.norm()
        self.drop = Dropout(cfg.dropout)

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need."""
        return super().dims._replace(head_dim=self.cfg.head_dim)

    @property
    def reads_prefix_positions(self) -> bool:
        """Whether the output depends on the positions of a prefix, `Prefix.positions`."""
        return True

    def lm_features(self, x):
        """Scales the decoder's states for the output table. [..., H] -> [..., H]"""
        cfg = self.cfg
        factor = cfg.width**-0.5 if cfg.scaled_output else 1.0
        # A tied table is divided like the residual stream, but must not be as the output table.
        return x * (factor * cfg.rescale if cfg.tied else factor)

    def _finish(self, x, deterministic: bool):
        return self.drop(self.norm(x), deterministic=deterministic)

    def _finish_decoder(self, x, deterministic: bool):
        return self.drop(self.decoder_norm(x), deterministic=deterministic)

    def _token_bias(self, positions, cache: Cache):
        return self.decoder_bias(positions, cache.positions)

    def _encoder_bias(self, batch: Batch, prefix: Prefix | None):
        tokens = batch.encoder
        # Distances in a text are those of columns, so all rows share one bias.
        columns = jnp.arange(tokens.ids.shape[1])[None]
        bias = self.bias(columns, columns)  # [1, N, T, T]
        positions = tokens.positions
        # All rows have the same positions, unless a row has several documents or prompts.
        is_packed = tokens.segments is not None
        shares_positions = tokens.lengths is not None and not is_packed and batch.prompt is None
        if prefix is not None and shares_positions:
            # Positions of padding do not matter.
            positions = columns + prefix.k.shape[2]
        return self._prepend_prefix_bias(self.bias, bias, positions, prefix)

    def _decoder_bias(self, positions, prefix: Prefix | None):
        bias = self.decoder_bias(positions, positions)
        return self._prepend_prefix_bias(self.decoder_bias, bias, positions, prefix)

    def _prepend_prefix_bias(self, table, bias, positions, prefix: Prefix | None):
        """Prepends the bias of a prefix. [B|1, N, T, S] -> [B|1, N, T, P+S]"""
        if prefix is None:
            return bias
        length = prefix.k.shape[2]
        # The bias of a prefix without positions is 0.
        if prefix.positions is None:
            return jnp.pad(bias, [(0, 0)] * 3 + [(length, 0)])
        prefix_bias = table(positions, prefix.positions[None])  # [B|1, N, T, P]
        text_bias = jnp.broadcast_to(bias, (*prefix_bias.shape[:3], bias.shape[3]))
        return jnp.concatenate([prefix_bias, text_bias], axis=-1)


def _without_positions(prefix: Prefix | None) -> Prefix | None:
    """Removes the positions, which have no axis of layers."""
    return prefix and prefix._replace(positions=None)


def make_config(hf: Mapping[str, Any], **changes: Any) -> T5Config:
    """Reads a T5 or mT5 config. Raises InputError if it needs an unsupported feature."""
    gate, _, activation = feed_forward_type(hf).rpartition("-")
    if gate and activation == "gelu":  # T5 1.1 was trained with this approximation
        activation = "gelu_new"
    if gate not in ("", "gated") or activation not in ACTIVATIONS:
        raise InputError(
            f"feed_forward_proj={brief(hf['feed_forward_proj'])} is not supported; use one of "
            f"{', '.join(ACTIVATIONS)}, optionally with the prefix gated-"
        )
    refuse_flags(hf, "is_decoder")
    if not read_flag(hf, "is_encoder_decoder", True):
        raise InputError("is_encoder_decoder=false is not supported; use a full T5")
    layers = read_size(hf, "num_layers")
    start_field = "decoder_start_token_id"
    if hf.get(start_field) is None and hf.get("pad_token_id") is not None:
        start_field = "pad_token_id"
    dropout = read_dropout(hf, "dropout_rate", 0.1)
    eps = read_positive(hf, "layer_norm_epsilon", 1e-6)
    rescale = changes.get("rescale", 1.0)
    buckets = read_size(hf, "relative_attention_num_buckets", 32)
    distance = read_size(hf, "relative_attention_max_distance", 128)
    # Below 4 there are no exact buckets per side, and the formula divides by their number.
    if buckets < 4 or not buckets // 2 < distance < 2**20:
        raise InputError(
            f"relative_attention_num_buckets={buckets} and relative_attention_max_distance="
            f"{distance} are invalid: the first must be at least 4, the second above half of the "
            "first and below 2**20; give the config.json that was saved with the weights"
        )
    # For T5 1.1, tie_word_embeddings=false means unscaled features; those of mT5 are never scaled,
    # though transformers 5 saves its configs as tied.
    scaled = hf.get("model_type") != "mt5" and read_flag(hf, "tie_word_embeddings", True)
    scaled = read_flag(hf, "scale_decoder_outputs", scaled)
    config = T5Config(
        vocab=read_size(hf, "vocab_size"),
        width=read_size(hf, "d_model"),
        layers=layers,
        decoder_layers=read_size(hf, "num_decoder_layers", layers),
        heads=read_size(hf, "num_heads"),
        head_dim=read_size(hf, "d_kv"),
        mlp=read_size(hf, "d_ff"),
        buckets=buckets,
        max_distance=distance,
        activation=activation,
        gated=bool(gate),
        eps=eps / rescale**2,  # added to the mean square of the divided stream
        # T5 has one rate for hidden states and probabilities.
        dropout=dropout,
        attention_dropout=dropout,
        scaled_output=scaled,
        start=read_id(hf, start_field),
        tied=read_flag(hf, "tie_word_embeddings", True),
    )
    return dataclasses.replace(config, **changes)
