"""The Llama family: decoders with rotary positions and gated MLPs (Touvron et al. 2023).

Its model types, and how they differ, are listed in convert/llama_fields.py. A prefix is like past
keys in transformers: it is not rotated, the text follows it, and in local layers it leaves the
window as the text continues. With prompt.shift=False it has no position, and all tokens see it.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
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
    ExpertsConfig,
    Rotations,
    read_activation,
    read_biases,
    read_cap,
    read_experts,
    read_heads,
    read_positions,
    read_rotations,
    read_type,
    read_windows,
)
from jaxprompt.errors import InputError
from jaxprompt.layers.attention import causal_mask, prepend_prefix, select_queries
from jaxprompt.layers.cache import write_token
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, write_slots
from jaxprompt.layers.mlp import GatedMlp, MixtureMlp
from jaxprompt.layers.norm import LayerNorm, RMSNorm
from jaxprompt.layers.quantized import scale_table
from jaxprompt.layers.rotary import RotaryAttention, make_rotations, rotate
from jaxprompt.layers.stack import run_stack, stack_options
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import (
    AttentionMask,
    AttentionWindow,
    Cache,
    Dims,
    LayerCache,
    Prefix,
    Tokens,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The dimensions of a Llama and how it is run."""

    key_heads: int  # heads of keys and values
    head_dim: int
    rotations: Rotations
    is_local: tuple[bool, ...]  # of each layer
    window: int = 0  # number of tokens that a token sees in local layers, itself included
    activation: str = "silu"
    eps: float = 1e-6
    scale: float | None = None  # of the scores, None = 1 / sqrt(head_dim)
    biases: frozenset[str] = frozenset()  # of llama_fields.read_biases, "norm" = those of norms
    norms: str = "pre"  # where they are: "pre", "post", "sandwich", "shared", see ModelType
    centred: bool = False  # norms subtract the mean
    sinks: bool = False  # see layers/attention.py
    experts: ExpertsConfig | None = None  # of `mlp` each; None = one MLP
    norm_offset: float = 0.0  # norms multiply by this + their scale
    head_norms: str = ""  # of queries and keys: "head" = of each head, "all" = of all at once
    interleaved: bool = False  # rotates neighbouring dimensions
    parallel: bool = False  # the MLP reads the input of the layer, not the attention's output
    gated: bool = True  # the MLP has a gate
    embed_scale: float = 1.0
    scales_slots: bool = False  # `embed_scale` applies to slot vectors too
    residual_scale: float = 1.0  # of what a layer adds
    logit_scale: float = 1.0
    cap: float = 0.0  # of the scores, 0 = none
    logit_cap: float = 0.0
    embed_dropout: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def norm(self) -> RMSNorm | LayerNorm:
        """Makes a norm."""
        if self.centred:
            return LayerNorm(self.eps, "norm" in self.biases)
        return RMSNorm(self.eps, self.norm_offset)

    def attention_options(self) -> dict[str, Any]:
        """Returns the fields of any attention of a layer."""
        return dict(
            width=self.width,
            heads=self.heads,
            head_dim=self.head_dim,
            dropout=self.attention_dropout,
            kernel=self.attention,
            dtype=self.dtype,
            scale=self.scale,
            use_bias="qkv" in self.biases,
            out_bias="out" in self.biases,
            key_heads=self.key_heads,
            cap=self.cap,
        )

    def make_mlp(self) -> GatedMlp | MixtureMlp:
        """Makes a feed-forward block."""
        recomputed = self.remat == "mlp"
        if self.experts:
            return MixtureMlp(*self.experts, self.mlp, self.activation, self.dtype, recomputed)
        return GatedMlp(
            self.mlp,
            self.activation,
            self.gated,
            0.0,
            self.dtype,
            "mlp" in self.biases,
            recomputed,
        )


class QKNormAttention(RotaryAttention):
    """Rotary attention whose queries and keys are normalised before rotation."""

    eps: float = 1e-6
    offset: float = 0.0
    norm_axes: int = 1  # 1 = each head, 2 = all heads at once

    def setup(self):
        """Declares the projections and the norms."""
        super().setup()
        self.query_norm = RMSNorm(self.eps, self.offset, self.norm_axes)
        self.key_norm = RMSNorm(self.eps, self.offset, self.norm_axes)

    def keys(self, x, rotations):
        """Projects what is attended to. [B, S, H] -> k, v [B, S, G, D]"""
        k = self.key_norm(self.key(x))
        return rotate(k, rotations, interleaved=self.interleaved), self.value(x)

    def queries(self, x, rotations):
        """Projects what attends. [B, T, H] -> [B, T, N, D]"""
        q = self.query_norm(self.query(x))
        return rotate(q, rotations, interleaved=self.interleaved)


class LlamaLayerInputs(NamedTuple):
    """The inputs of one layer besides its parameters; leaves have a leading axis of layers."""

    prefix: Prefix | None
    is_local: Any  # bool
    rotation: Any  # int, the index of its rotary embeddings


class Layer(nn.Module):
    """One layer. [B, T, H] -> [B, T, H]"""

    cfg: LlamaConfig

    def setup(self):
        """Declares the parts."""
        cfg = self.cfg
        make_attention = RotaryAttention
        if cfg.head_norms:
            axes = 2 if cfg.head_norms == "all" else 1
            make_attention = partial(
                QKNormAttention, eps=cfg.eps, offset=cfg.norm_offset, norm_axes=axes
            )
        self.attention = make_attention(
            **cfg.attention_options(), interleaved=cfg.interleaved, has_sinks=cfg.sinks
        )
        self.mlp = cfg.make_mlp()
        if cfg.norms != "post":
            self.attention_norm = cfg.norm()
        if cfg.norms in ("pre", "sandwich"):
            self.mlp_norm = cfg.norm()
        if cfg.norms in ("post", "sandwich"):
            self.behind_attention_norm, self.behind_mlp_norm = cfg.norm(), cfg.norm()
        self.drop = Dropout(cfg.dropout)

    def __call__(
        self,
        x,
        inputs: LlamaLayerInputs,
        mask: AttentionMask,
        positions,
        rotations,
        *,
        deterministic: bool,
        return_kv: bool = False,
        output_positions=None,
    ):
        """Runs the layer, only at the positions `output_positions` [B, M] if given.

        return_kv=True also returns its k, v, without the prefix. positions: int [B, T]; rotations:
        those of `LlamaConfig.rotations`.
        """
        layer_rotations = self._select_rotations(inputs.rotation, rotations)
        y = self._normalize_input(x)
        text_k, text_v = self.attention.keys(y, layer_rotations)
        k, v, mask = prepend_prefix(inputs.prefix, text_k, text_v, mask)
        mask = self._apply_window(mask, inputs, positions)
        mask, x, y, layer_rotations = select_queries(output_positions, mask, x, y, layer_rotations)
        attended = self.attention(y, k, v, mask, layer_rotations, deterministic=deterministic)
        kv = (text_k, text_v) if return_kv else None
        return self._add_outputs(x, y, attended, deterministic), kv

    def step(
        self,
        x,
        layer_cache: LayerCache,
        visible,
        column,
        is_local: bool,
        rotation: int,
        position,
        columns,
        rotations,
    ):
        """Runs the layer on one more token. [B*K, H] -> [B*K, H], the cache with the token

        visible: bool [B, K, S], the columns of each beam's new tokens; position: int [B*K];
        columns: int [B, S], the positions of the cached tokens.
        """
        rotations = rotations[rotation]
        y = self._normalize_input(x)
        k, v = self.attention.keys(y[:, None], rotations)
        layer_cache = write_token(layer_cache, k[:, 0], v[:, 0], column)
        mask = layer_cache.mask[:, None] | visible  # [B, K, S]
        # It is known when tracing, so that global layers compute no window.
        if is_local:
            columns = columns[:, None]
            is_near = columns > position.reshape(len(columns), -1, 1) - self.cfg.window
            # Positions below 0 are those of a prefix without positions.
            mask = mask & (is_near | (columns < 0))
        q = self.attention.queries(y[:, None], rotations)[:, 0]
        attended = self.attention.attend_cached_queries(q, layer_cache, mask)
        return self._add_outputs(x, y, attended, True), layer_cache

    def _normalize_input(self, x):
        """Returns what the attention reads."""
        return x if self.cfg.norms == "post" else self.attention_norm(x)

    def _add_outputs(self, x, y, attended, deterministic: bool):
        """Adds the outputs of the attention and of the MLP to the residual stream.

        Args:
          x: the input of the layer.
          y: the input of the attention.
          attended: the output of the attention.
          deterministic: turns dropout off.
        """
        cfg = self.cfg
        attended = x + self._post_norm("attention", attended, deterministic)
        if cfg.norms == "shared":
            mlp_input = y
        else:
            mlp_input = x if cfg.parallel else attended
            mlp_input = mlp_input if cfg.norms == "post" else self.mlp_norm(mlp_input)
        y = self.mlp(mlp_input, deterministic=deterministic)
        return attended + self._post_norm("mlp", y, deterministic)

    def _post_norm(self, part: str, y, deterministic: bool):
        if self.cfg.norms in ("post", "sandwich"):
            y = getattr(self, f"behind_{part}_norm")(y)
        if self.cfg.residual_scale != 1.0:
            y = y * self.cfg.residual_scale
        return self.drop(y, deterministic=deterministic)

    def _select_rotations(self, index, rotations):
        """Returns the rotations of a layer, without a choice if all are alike."""
        of_layer = self.cfg.rotations.of_layer
        if len(set(of_layer)) == 1:
            return rotations[of_layer[0]]
        return jax.tree.map(lambda a, b: jnp.where(index, b, a), *rotations)

    def _apply_window(
        self, mask: AttentionMask, inputs: LlamaLayerInputs, positions
    ) -> AttentionMask:
        """Hides keys outside of a local layer's window."""
        cfg, prefix = self.cfg, inputs.prefix
        prefix_positions = None if prefix is None else prefix.positions
        prefix_length = 0 if prefix is None else prefix.k.shape[1]
        # A prefix without positions is always visible.
        num_global = prefix_length if prefix_positions is None else 0
        # Not an int in a program for any length, which always applies the window.
        length = positions.shape[1]
        fits_window = isinstance(length, int) and length + prefix_length - num_global <= cfg.window
        if fits_window or not any(cfg.is_local):
            return mask
        is_hidden = positions[:, None, :] <= positions[:, :, None] - cfg.window  # [B, T, T]
        if prefix_length:
            hides_prefix = jnp.zeros((*positions.shape, prefix_length), bool)
            if prefix_positions is not None:
                hides_prefix = prefix_positions <= positions[:, :, None] - cfg.window
            is_hidden = jnp.concatenate([hides_prefix, is_hidden], axis=-1)
        visible = mask.mask if mask.mask.ndim == 3 else mask.mask[:, None]
        windowed = AttentionMask(visible & ~(is_hidden & inputs.is_local))
        if mask.lengths is None:
            return windowed
        # Distances of columns equal those of positions, so a kernel needs no mask for the window.
        is_local = True if all(cfg.is_local) else inputs.is_local
        window = AttentionWindow(cfg.window, is_local, num_global)
        return windowed._replace(keys=mask.keys, causal=True, lengths=mask.lengths, window=window)


class Embed(nn.Module):
    """Word and slot embeddings. -> [B, T, H]"""

    cfg: LlamaConfig

    def setup(self):
        """Declares the table."""
        cfg = self.cfg
        self.word = Table(cfg.rows or cfg.vocab, cfg.width, cfg.dtype)
        self.drop = Dropout(cfg.embed_dropout)

    def __call__(self, ids, positions, slot=None, slots=None, *, deterministic: bool):
        """Embeds tokens, with slot vectors at their positions. int [B, T] x 3

        `positions` are unused: attention rotates by them.
        """
        cfg = self.cfg
        x = self.word(ids)
        # Rounded to the type first, as transformers does: in bfloat16 sqrt(3072) becomes 55.5.
        scale = jnp.asarray(cfg.embed_scale, cfg.dtype)
        # Before the slots are written: their initial values, from `words`, are already scaled.
        if cfg.embed_scale != 1.0 and not cfg.scales_slots:
            x = x * scale
        x = write_slots(x, slot, slots)
        if cfg.scales_slots:
            x = x * scale
        # In `extend` x is [B, H], one token of each row.
        if x.ndim == 3:
            x = constrain(x, "act_batch", None, None)
        return self.drop(x, deterministic=deterministic)


class Backbone(Decoder):
    """The decoder and its output table."""

    cfg: LlamaConfig
    EMBED = Embed
    LAYER = Layer

    @nn.nowrap
    def example(self) -> tuple[Any, ...]:
        """Returns the other arguments of a layer, besides its input."""
        positions = jnp.zeros((1, 2), jnp.int32)
        mask = AttentionMask(jnp.ones((1, 2), bool))
        return LlamaLayerInputs(None, False, 0), mask, positions, self._rotations(positions)

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need; heads are key-value heads."""
        return super().dims._replace(heads=self.cfg.key_heads, head_dim=self.cfg.head_dim)

    @property
    def reads_prefix_positions(self) -> bool:
        """Whether the output depends on the positions of a prefix, `Prefix.positions`."""
        return any(self.cfg.is_local)

    def _step_inputs(self, positions, cache: Cache, column) -> list[tuple[Any, ...]]:
        shared = positions, cache.positions, self._rotations(positions[:, None])
        layers = zip(self.cfg.is_local, self.cfg.rotations.of_layer, strict=True)
        return [(cache.visible, column, *layer, *shared) for layer in layers]

    def words(self):
        """Returns the word embeddings on the scale of slot vectors. -> [V, H]"""
        scale = 1.0 if self.cfg.scales_slots else self.cfg.embed_scale
        return scale_table(self.embed.word.table, scale)

    def lm_features(self, x):
        """Returns the states whose products with the output table are the logits."""
        return x if self.cfg.logit_scale == 1.0 else x * self.cfg.logit_scale

    @nn.nowrap
    def _rotations(self, positions):
        interleaved = self.cfg.interleaved
        return tuple(
            make_rotations(positions, np.array(x.frequencies), x.scale, interleaved=interleaved)
            for x in self.cfg.rotations.params
        )

    def _run(self, x, prefix: Prefix | None, tokens: Tokens, deterministic: bool, **options: Any):
        cfg = self.cfg
        if prefix is not None and prefix.positions is not None:
            self.check_shift(prefix.k.shape[2])
            # `run_stack` splits leaves by their axis of layers, which positions lack.
            shape = (cfg.layers, *prefix.positions.shape)
            prefix = prefix._replace(positions=jnp.broadcast_to(prefix.positions, shape))
        of_layer = np.array(cfg.rotations.of_layer)
        layer_inputs = LlamaLayerInputs(prefix, np.array(cfg.is_local), of_layer)
        return run_stack(
            self.layer,
            self.layers,
            x,
            layer_inputs,
            causal_mask(tokens),
            tokens.positions,
            self._rotations(tokens.positions),
            **stack_options(self, deterministic),
            **options,
        )

    @nn.nowrap
    def check_shift(self, length: int) -> None:
        """Raises InputError for a prefix that takes enough positions to fill a window."""
        if any(self.cfg.is_local):
            check_window(length, self.cfg.window)


def check_window(length: int, window: int) -> None:
    """Raises InputError for a prefix of `length` positions that fills a window."""
    if length >= window:
        raise InputError(
            f"a prefix of {length} tokens does not fit the window of {window} tokens of this "
            f"model's local layers; use prompt.length below {window}, or prompt.shift=False"
        )


def make_config(hf: Mapping[str, Any], **changes: Any) -> LlamaConfig:
    """Reads a config. Raises InputError if it needs an unsupported feature."""
    name, kind = read_type(hf)
    refuse_flags(hf, "use_bidirectional_attention", "add_cross_attention", "is_encoder_decoder")
    heads, key_heads, size = read_heads(hf)
    layers = read_size(hf, "num_hidden_layers")
    is_local, window = read_windows(hf, layers)
    width = read_size(hf, "hidden_size")
    positions = read_positions(hf)
    rotations = read_rotations(hf, size, positions, is_local)
    config = LlamaConfig(
        vocab=read_size(hf, "vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        key_heads=key_heads,
        head_dim=size,
        mlp=read_size(hf, kind.mlp_width),
        positions=min([positions, *(x.limit for x in rotations.params if x.limit)]),
        rotations=rotations,
        is_local=is_local,
        window=window,
        activation=read_activation(hf),
        eps=read_positive(hf, *kind.norm_eps),
        biases=read_biases(hf),
        norms=kind.norms,
        centred=kind.centred,
        sinks=kind.sinks,
        experts=read_experts(hf),
        norm_offset=float(kind.gemma),
        head_norms=kind.head_norms,
        interleaved=kind.interleaved,
        parallel=kind.norms == "shared",
        cap=read_cap(hf, "attn_logit_softcapping", 50.0),
        logit_cap=read_cap(hf, "final_logit_softcapping", 30.0),
        attention_dropout=read_dropout(hf, "attention_dropout", 0.0),
        tied=read_tied(hf, "llama"),
        **_read_scales(hf, width),
        **_read_dropouts(hf),
    )
    if kind.sinks:
        if changes.get("attention") == "fused":
            raise InputError(
                f"attention=fused is not supported for {name}, for whose attention sinks there is "
                "no kernel; use auto"
            )
        changes["attention"] = "einsum"
    return dataclasses.replace(config, **changes)


def _read_scales(hf: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Reads the scales of scores, embeddings, residual stream and logits of some model types."""
    name, kind = read_type(hf)
    scales = {}
    if kind.gemma:
        scales["embed_scale"] = width**0.5  # as in Vaswani et al. 2017, section 3.4
    if name in ("gemma2", "gemma3_text"):  # need not be that of the head's width
        scales["scale"] = read_positive(hf, "query_pre_attn_scalar", 256.0) ** -0.5
    elif name == "granite":
        scales["scale"] = read_positive(hf, "attention_multiplier", 1.0)
        scales["embed_scale"] = read_positive(hf, "embedding_multiplier", 1.0)
        # transformers scales `inputs_embeds`, which include the soft tokens of PEFT.
        scales["scales_slots"] = True
        scales["residual_scale"] = read_positive(hf, "residual_multiplier", 1.0)
        scales["logit_scale"] = 1 / read_positive(hf, "logits_scaling", 1.0)
    elif name == "cohere2":
        scales["logit_scale"] = read_positive(hf, "logit_scale", 0.0625)
    return scales


def _read_dropouts(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the rates of Phi-3 besides that of attention; the other model types have none."""
    if read_type(hf)[0] != "phi3":
        return {}
    fields = {"embed_dropout": "embd_pdrop", "dropout": "resid_pdrop"}
    return {name: read_dropout(hf, field, 0.0) for name, field in fields.items()}
