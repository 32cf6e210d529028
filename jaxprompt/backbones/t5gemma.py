"""T5Gemma: an encoder and a decoder of Gemma 2's layers (Zhang et al. 2025).

The encoder sees both sides, in local layers as many tokens on each side as the window has. Prefixes
are like past keys, as in the Llama family: not rotated, and outside of the window once the text is
long enough. Cross-attention has no positions.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.backbones import llama
from jaxprompt.backbones.llama import LlamaConfig, LlamaLayerInputs
from jaxprompt.backbones.t5 import EncoderDecoder
from jaxprompt.convert.hf_config import read_block, read_dropout, read_flag, read_id
from jaxprompt.errors import InputError
from jaxprompt.layers.attention import (
    Attention,
    bidirectional_mask,
    causal_mask,
    prepend_prefix,
    select_queries,
)
from jaxprompt.layers.cache import show_token, step_layers, write_position, write_token
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, output_bias, write_slots
from jaxprompt.layers.mlp import GatedMlp
from jaxprompt.layers.quantized import scale_table
from jaxprompt.layers.rotary import make_rotations
from jaxprompt.layers.stack import declare_param, init_stack, run_stack, stack_options
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import AttentionMask, Batch, Cache, Dims, LayerCache, Prefix

_MODULES = ("encoder", "decoder")
_START = 2  # bos_token_id


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5GemmaConfig(LlamaConfig):
    """The dimensions of a T5Gemma and how it is run; `layers` and `is_local` are the encoder's."""

    decoder_layers: int
    decoder_is_local: tuple[bool, ...]
    start: int  # id of the decoder's first input

    def make_mlp(self) -> GatedMlp:
        """Makes a feed-forward block."""
        return GatedMlp(
            self.mlp,
            self.activation,
            True,
            self.dropout,
            self.dtype,
            recomputed=self.remat == "mlp",
        )


class DecoderLayerInputs(NamedTuple):
    """The inputs of one layer besides its parameters; leaves have a leading axis of layers."""

    prefix: Prefix | None
    is_local: Any  # bool
    cross_prefix: Prefix | None


class EncoderLayer(llama.Layer):
    """One layer that sees both sides. [B, T, H] -> [B, T, H]"""

    def _apply_window(self, mask: AttentionMask, inputs: LlamaLayerInputs, positions):
        """Hides keys outside of a local layer's window."""
        cfg, prefix = self.cfg, inputs.prefix
        length = mask.mask.shape[-1]
        if not any(cfg.is_local) or (isinstance(length, int) and length <= cfg.window + 1):
            return mask
        keys = positions  # [B, S]
        if prefix is not None and prefix.positions is not None:
            earlier = jnp.broadcast_to(prefix.positions, (len(keys), prefix.k.shape[1]))
            keys = jnp.concatenate([earlier, keys], axis=1)
        is_far = jnp.abs(keys[:, None, :] - positions[:, :, None]) > cfg.window  # [B, T, S]
        if is_far.shape[-1] < length:  # a prefix without positions is always visible
            is_far = jnp.pad(is_far, [(0, 0), (0, 0), (length - is_far.shape[-1], 0)])
        visible = mask.mask if mask.mask.ndim == 3 else mask.mask[:, None]
        return AttentionMask(visible & ~(is_far & inputs.is_local))


class DecoderLayer(llama.Layer):
    """One layer that also attends to the encoder's output. [B, T, H] -> [B, T, H]"""

    def setup(self):
        """Declares the parts."""
        super().setup()
        cfg = self.cfg
        self.cross = Attention(**cfg.attention_options())
        self.cross_norm, self.behind_cross_norm = cfg.norm(), cfg.norm()

    def __call__(  # type: ignore[override]  # `run_stack` calls each kind as it is
        self,
        x,
        inputs: DecoderLayerInputs,
        mask: AttentionMask,
        positions,
        rotations,
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
        y = self.attention_norm(x)
        text_k, text_v = self.attention.keys(y, rotations)
        k, v, mask = prepend_prefix(inputs.prefix, text_k, text_v, mask)
        window_inputs = LlamaLayerInputs(inputs.prefix, inputs.is_local, 0)
        mask = self._apply_window(mask, window_inputs, positions)
        mask, x, y, rotations = select_queries(output_positions, mask, x, y, rotations)
        y = self.attention(y, k, v, mask, rotations, deterministic=deterministic)
        x = x + self._post_norm("attention", y, deterministic)
        cross_k, cross_v = self.cross.keys(encoder_states)
        k, v, mask = prepend_prefix(inputs.cross_prefix, cross_k, cross_v, encoder_mask)
        (mask,) = select_queries(output_positions, mask)
        y = self.cross(self.cross_norm(x), k, v, mask, deterministic=deterministic)
        x = x + self._post_norm("cross", y, deterministic)
        y = self.mlp(self.mlp_norm(x), deterministic=deterministic)
        x = x + self._post_norm("mlp", y, deterministic)
        return x, (text_k, text_v, cross_k, cross_v) if return_kv else None

    def step(  # type: ignore[override]
        self,
        x,
        layer_cache: LayerCache,
        cross: LayerCache,
        visible,
        column,
        is_local: bool,
        position,
        columns,
        rotations,
    ):
        """Runs the layer on one more token, as in `llama.Layer.step`. [B*K, H] -> [B*K, H]"""
        y = self.attention_norm(x)[:, None]
        k, v = self.attention.keys(y, rotations)
        layer_cache = write_token(layer_cache, k[:, 0], v[:, 0], column)
        mask = layer_cache.mask[:, None] | visible  # [B, K, S]
        if is_local:
            columns = columns[:, None]
            is_near = columns > position.reshape(len(columns), -1, 1) - self.cfg.window
            # Positions below 0 are those of a prefix without positions.
            mask = mask & (is_near | (columns < 0))
        q = self.attention.queries(y, rotations)[:, 0]
        y = self.attention.attend_cached_queries(q, layer_cache, mask)
        x = x + self._post_norm("attention", y, True)
        y = self.cross.attend_cached(self.cross_norm(x), cross, cross.mask[:, None])
        x = x + self._post_norm("cross", y, True)
        y = self.mlp(self.mlp_norm(x), deterministic=True)
        return x + self._post_norm("mlp", y, True), layer_cache


class Embed(nn.Module):
    """Word embeddings of both streams, and slots. -> [B, T, H]"""

    cfg: T5GemmaConfig

    def setup(self):
        """Declares the tables."""
        cfg = self.cfg
        shape = cfg.rows or cfg.vocab, cfg.width, cfg.dtype
        self.word, self.decoder_word = Table(*shape), Table(*shape)
        self.drop = Dropout(cfg.embed_dropout)

    def __call__(self, tokens, slots, *, deterministic: bool, decodes: bool = False):
        """Embeds tokens, with slot vectors at their positions."""
        table = self.decoder_word if decodes else self.word
        # As in `llama.Embed`, slots are already scaled.
        x = write_slots(self._scale(table(tokens.ids)), tokens.slot, slots)
        x = constrain(x, "act_batch", None, None)
        return self.drop(x, deterministic=deterministic)

    def embed_token(self, ids, positions):
        """Embeds one token of each row of the decoder. int [B] x 2 -> [B, H]"""
        return self._scale(self.decoder_word(ids))

    def _scale(self, x):
        return x * jnp.asarray(self.cfg.embed_scale, self.cfg.dtype)


class Backbone(EncoderDecoder):
    """The encoder, the decoder and the output table."""

    cfg: T5GemmaConfig
    EMBED = Embed

    def setup(self):
        """Declares the parts in the checkpoint."""
        cfg = self.cfg
        x, mask = jnp.zeros((1, 2, cfg.width)), AttentionMask(jnp.ones((1, 2), bool))
        positions = jnp.zeros((1, 2), jnp.int32)
        rotations = self._rotations(positions)
        self.embed = Embed(cfg)
        self.layer = EncoderLayer(cfg, parent=None)
        example = x, LlamaLayerInputs(None, False, 0), mask, positions, (rotations,)
        self.layers = declare_param(self, "layers", init_stack(self.layer, cfg.layers, *example))
        decoder_cfg = dataclasses.replace(cfg, is_local=cfg.decoder_is_local)
        self.decoder_layer = DecoderLayer(decoder_cfg, parent=None)
        decoder_inputs = DecoderLayerInputs(None, False, None)
        example = x, decoder_inputs, mask, positions, rotations, x, mask
        init = init_stack(self.decoder_layer, cfg.decoder_layers, *example)
        self.decoder_layers = declare_param(self, "decoder_layers", init)
        self.norm, self.decoder_norm = cfg.norm(), cfg.norm()
        self.drop = Dropout(cfg.dropout)
        if not cfg.tied:
            self.lm = Table(cfg.rows or cfg.vocab, cfg.width, cfg.dtype)

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need; heads are key-value heads."""
        return super().dims._replace(heads=self.cfg.key_heads, head_dim=self.cfg.head_dim)

    @property
    def reads_prefix_positions(self) -> bool:
        """Whether the output depends on the positions of a prefix, `Prefix.positions`."""
        return any((*self.cfg.is_local, *self.cfg.decoder_is_local))

    @nn.nowrap
    def check_shift(self, length: int) -> None:
        """Raises InputError for a prefix that takes enough positions to fill a window."""
        if self.reads_prefix_positions:
            llama.check_window(length, self.cfg.window)

    def words(self):
        """Returns the word embeddings as they enter the encoder's first layer. -> [V, H]"""
        return scale_table(self.embed.word.table, self.cfg.embed_scale)

    def lm_table(self):
        """Returns the output table and no bias, except that of padding. -> [V, H], None or [V]"""
        table = self.embed.decoder_word.table if self.cfg.tied else self.lm.table
        return table, output_bias(table, None, self.cfg.vocab)

    def extend(self, layers, ids, positions, cache: Cache, column) -> tuple[Any, Cache]:
        """Runs one more token of each beam through each of the `reading_layers`.

        int [B*K], int [B*K], int scalar -> its state [B*K, H], the cache
        """
        x = self.embed.embed_token(ids, positions)
        cache = write_position(show_token(cache, column), positions, column)
        shared = positions, cache.positions, self._rotations(positions[:, None])
        per_layer = zip(cache.cross or (), self.cfg.decoder_is_local, strict=True)
        inputs = [
            (cross, cache.visible, column, is_local, *shared) for cross, is_local in per_layer
        ]
        x, layer_caches = step_layers(self.decoder_layer, layers, x, cache.self_attention, inputs)
        return self._finish_decoder(x, True), cache._replace(self_attention=layer_caches)

    @nn.nowrap
    def _rotations(self, positions):
        (rotary,) = self.cfg.rotations.params
        return make_rotations(positions, np.array(rotary.frequencies), rotary.scale)

    @nn.nowrap
    def _with_layers(self, prefix: Prefix | None, layers: int) -> Prefix | None:
        """Repeats the positions of a prefix for each layer, which `run_stack` splits."""
        if prefix is None or prefix.positions is None:
            return prefix
        self.check_shift(prefix.k.shape[2])
        shape = (layers, *prefix.positions.shape)
        return prefix._replace(positions=jnp.broadcast_to(prefix.positions, shape))

    def _finish(self, x, deterministic: bool):
        return self.drop(self.norm(x), deterministic=deterministic)

    def _finish_decoder(self, x, deterministic: bool):
        return self.drop(self.decoder_norm(x), deterministic=deterministic)

    def _encode(
        self, x, prefix: Prefix | None, batch: Batch, deterministic: bool, **layer_range: int
    ):
        cfg, tokens = self.cfg, batch.encoder
        of_layer = np.array(cfg.rotations.of_layer)
        prefix = self._with_layers(prefix, cfg.layers)
        inputs = LlamaLayerInputs(prefix, np.array(cfg.is_local), of_layer)
        return run_stack(
            self.layer,
            self.layers,
            x,
            inputs,
            bidirectional_mask(tokens, tokens),
            tokens.positions,
            (self._rotations(tokens.positions),),
            **layer_range,
            **stack_options(self, deterministic),
        )[0]

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
        cfg, (prefix, cross_prefix) = self.cfg, prefixes
        inputs = DecoderLayerInputs(
            self._with_layers(prefix, cfg.decoder_layers),
            np.array(cfg.decoder_is_local),
            cross_prefix and cross_prefix._replace(positions=None),
        )
        x, layer_kv = run_stack(
            self.decoder_layer,
            self.decoder_layers,
            x,
            inputs,
            causal_mask(tokens),
            tokens.positions,
            self._rotations(tokens.positions),
            encoder_states,
            bidirectional_mask(tokens, encoder_tokens),
            **options,
            **stack_options(self, deterministic),
        )
        return self._finish_decoder(x, deterministic), layer_kv


def make_config(hf: Mapping[str, Any], **changes: Any) -> T5GemmaConfig:
    """Reads a config. Raises InputError if it needs an unsupported feature."""
    if not read_flag(hf, "is_encoder_decoder", True):
        raise InputError("is_encoder_decoder=false is not supported; use a full T5Gemma")
    encoder, decoder = (_read_module(hf, name) for name in _MODULES)
    # All layers rotate alike, so these differ in nothing but their number.
    rotations = decoder.rotations._replace(of_layer=encoder.rotations.of_layer)
    decoder = dataclasses.replace(decoder, rotations=rotations)
    fields = {field.name: getattr(encoder, field.name) for field in dataclasses.fields(LlamaConfig)}
    for name, value in fields.items():
        if name not in ("layers", "is_local") and getattr(decoder, name) != value:
            raise InputError(
                f"the encoder has {name}={value} and the decoder {getattr(decoder, name)}; only a "
                "T5Gemma whose encoder and decoder differ in nothing but their layers is supported"
            )
    dropout = read_dropout(hf, "dropout_rate", 0.0)
    fields |= dict(
        decoder_layers=decoder.layers,
        decoder_is_local=decoder.is_local,
        start=read_id(read_block(hf, "decoder"), "bos_token_id", _START),
        dropout=dropout,
        embed_dropout=dropout,
        tied=read_flag(hf, "tie_word_embeddings", True),
    )
    return dataclasses.replace(T5GemmaConfig(**fields), **changes)


def _read_module(hf: Mapping[str, Any], name: str) -> LlamaConfig:
    """Reads the config of the encoder or the decoder, whose fields are those of a Gemma 2."""
    shared = {"model_type": "gemma2", "attention_dropout": hf.get("attention_dropout")}
    return llama.make_config({**read_block(hf, name), **shared})
