"""The Llama family: pre-norm decoders with rotary positions and gated MLPs (Touvron et al. 2023).

Model types: llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text, and those with experts
instead of one MLP, mixtral, qwen3_moe and gpt_oss. A prefix is like past keys
in transformers: it is not rotated, the text follows it, and in local layers it leaves the window as
the text continues. With prompt.shift=False it has no position, and all tokens see it.
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
    GPT_OSS_ROPE,
    LAYER_TYPES,
    ExpertsConfig,
    read_activation,
    read_biases,
    read_cap,
    read_experts,
    read_heads,
    read_positions,
    read_type,
    read_windows,
)
from jaxprompt.convert.rope import RotaryParams, read_rotary
from jaxprompt.errors import InputError
from jaxprompt.layers.attention import causal_mask, prepend_prefix, select_queries
from jaxprompt.layers.cache import write_token
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, write_slots
from jaxprompt.layers.mlp import GatedMlp, MixtureMlp
from jaxprompt.layers.norm import RMSNorm
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
    turnings: tuple[RotaryParams, ...]  # of global and of local layers
    is_local: tuple[bool, ...]  # of each layer
    window: int = 0  # number of tokens that a token sees in local layers, itself included
    activation: str = "silu"
    eps: float = 1e-6
    scale: float | None = None  # of the scores, None = 1 / sqrt(head_dim)
    biases: frozenset[str] = frozenset()  # of llama_fields.read_biases
    head_norms: bool = False
    sinks: bool = False  # see layers/attention.py
    sandwich: bool = False  # norms after the attention and the MLP too
    experts: ExpertsConfig | None = None  # of `mlp` each; None = one MLP
    norm_offset: float = 0.0  # norms multiply by this + their scale
    embed_scale: float = 1.0
    cap: float = 0.0  # of the scores, 0 = none
    logit_cap: float = 0.0
    embed_dropout: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def norm(self) -> RMSNorm:
        """Makes a norm."""
        return RMSNorm(self.eps, self.norm_offset)

    def make_mlp(self) -> GatedMlp | MixtureMlp:
        """Makes a feed-forward block."""
        recomputed = self.remat == "mlp"
        if self.experts:
            return MixtureMlp(*self.experts, self.mlp, self.activation, self.dtype, recomputed)
        return GatedMlp(
            self.mlp, self.activation, True, 0.0, self.dtype, "mlp" in self.biases, recomputed
        )


class QKNormAttention(RotaryAttention):
    """Rotary attention whose queries and keys are normalised before rotation."""

    eps: float = 1e-6
    offset: float = 0.0

    def setup(self):
        """Declares the projections and the norms."""
        super().setup()
        self.query_norm = RMSNorm(self.eps, self.offset)
        self.key_norm = RMSNorm(self.eps, self.offset)

    def keys(self, x, rotations):
        """Projects what is attended to. [B, S, H] -> k, v [B, S, G, D]"""
        return rotate(self.key_norm(self.key(x)), rotations), self.value(x)

    def queries(self, x, rotations):
        """Projects what attends. [B, T, H] -> [B, T, N, D]"""
        return rotate(self.query_norm(self.query(x)), rotations)


class LlamaLayerInputs(NamedTuple):
    """The inputs of one layer besides its parameters; leaves have a leading axis of layers."""

    prefix: Prefix | None
    is_local: Any  # bool


class Layer(nn.Module):
    """One pre-norm layer. [B, T, H] -> [B, T, H]"""

    cfg: LlamaConfig

    def setup(self):
        """Declares the parts."""
        cfg = self.cfg
        make_attention = RotaryAttention
        if cfg.head_norms:
            make_attention = partial(QKNormAttention, eps=cfg.eps, offset=cfg.norm_offset)
        self.attention = make_attention(
            cfg.width,
            cfg.heads,
            cfg.head_dim,
            cfg.attention_dropout,
            cfg.attention,
            cfg.dtype,
            cfg.scale,
            use_bias="qkv" in cfg.biases,
            out_bias="out" in cfg.biases,
            key_heads=cfg.key_heads,
            cap=cfg.cap,
            has_sinks=cfg.sinks,
        )
        self.mlp = cfg.make_mlp()
        self.attention_norm, self.mlp_norm = cfg.norm(), cfg.norm()
        if cfg.sandwich:
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
        of global and of local layers.
        """
        layer_rotations = self._select_rotations(inputs.is_local, rotations)
        y = self.attention_norm(x)
        text_k, text_v = self.attention.keys(y, layer_rotations)
        k, v, mask = prepend_prefix(inputs.prefix, text_k, text_v, mask)
        mask = self._apply_window(mask, inputs, positions)
        mask, x, y, layer_rotations = select_queries(output_positions, mask, x, y, layer_rotations)
        y = self.attention(y, k, v, mask, layer_rotations, deterministic=deterministic)
        x = x + self._post_norm("attention", y, deterministic)
        y = self.mlp(self.mlp_norm(x), deterministic=deterministic)
        kv = (text_k, text_v) if return_kv else None
        return x + self._post_norm("mlp", y, deterministic), kv

    def step(
        self,
        x,
        layer_cache: LayerCache,
        visible,
        column,
        is_local: bool,
        position,
        columns,
        rotations,
    ):
        """Runs the layer on one more token. [B*K, H] -> [B*K, H], the cache with the token

        visible: bool [B, K, S], the columns of each beam's new tokens; position: int [B*K];
        columns: int [B, S], the positions of the cached tokens.
        """
        # `is_local` is known when tracing, so that global layers compute no window.
        rotations = rotations[int(is_local)]
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
        y = self.mlp(self.mlp_norm(x), deterministic=True)
        return x + self._post_norm("mlp", y, True), layer_cache

    def _post_norm(self, part: str, y, deterministic: bool):
        if self.cfg.sandwich:
            y = getattr(self, f"behind_{part}_norm")(y)
        return self.drop(y, deterministic=deterministic)

    def _select_rotations(self, is_local, rotations):
        """Returns the rotations of a global or local layer, without a choice if all are alike."""
        if len(set(self.cfg.is_local)) == 1:
            return rotations[int(self.cfg.is_local[0])]
        return jax.tree.map(lambda a, b: jnp.where(is_local, b, a), *rotations)

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
        # Before the slots are written: their initial values, from `words`, are already scaled.
        if cfg.embed_scale != 1.0:
            # Rounded to the type first, as transformers does: in bfloat16 sqrt(3072) becomes 55.5.
            x = x * jnp.asarray(cfg.embed_scale, cfg.dtype)
        x = write_slots(x, slot, slots)
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
        return LlamaLayerInputs(None, False), mask, positions, self._rotations(positions)

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
        return [(cache.visible, column, is_local, *shared) for is_local in self.cfg.is_local]

    def words(self):
        """Returns the word embeddings as they enter the first layer. -> [V, H]"""
        return scale_table(self.embed.word.table, self.cfg.embed_scale)

    @nn.nowrap
    def _rotations(self, positions):
        return tuple(
            make_rotations(positions, np.array(t.frequencies), t.scale) for t in self.cfg.turnings
        )

    def _run(self, x, prefix: Prefix | None, tokens: Tokens, deterministic: bool, **options: Any):
        cfg = self.cfg
        if prefix is not None and prefix.positions is not None:
            self.check_shift(prefix.k.shape[2])
            # `run_stack` splits leaves by their axis of layers, which positions lack.
            shape = (cfg.layers, *prefix.positions.shape)
            prefix = prefix._replace(positions=jnp.broadcast_to(prefix.positions, shape))
        layer_inputs = LlamaLayerInputs(prefix, np.array(cfg.is_local))
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
    is_local, window = read_windows(hf, name, layers)
    width = read_size(hf, "hidden_size")
    positions = read_positions(hf)
    # Gemma 2 and 3 configure their scale, which need not be that of the head's width.
    scale = read_positive(hf, "query_pre_attn_scalar", 256.0) ** -0.5 if kind.sandwich else None
    config = LlamaConfig(
        vocab=read_size(hf, "vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        key_heads=key_heads,
        head_dim=size,
        mlp=read_size(hf, kind.mlp_width),
        positions=positions,
        turnings=_read_turnings(hf, name, size, positions),
        is_local=is_local,
        window=window,
        activation=read_activation(hf),
        eps=read_positive(hf, "rms_norm_eps", kind.eps),
        scale=scale,
        biases=read_biases(hf),
        head_norms=kind.head_norms,
        sinks=kind.sinks,
        sandwich=kind.sandwich,
        experts=read_experts(hf),
        norm_offset=float(kind.gemma),
        # Gemma multiplies embeddings by sqrt(H), as Vaswani et al. 2017, section 3.4, do.
        embed_scale=width**0.5 if kind.gemma else 1.0,
        cap=read_cap(hf, "attn_logit_softcapping", 50.0),
        logit_cap=read_cap(hf, "final_logit_softcapping", 30.0),
        attention_dropout=read_dropout(hf, "attention_dropout", 0.0),
        tied=read_tied(hf, "llama"),
    )
    if kind.sinks:
        if changes.get("attention") == "fused":
            raise InputError(
                f"attention=fused is not supported for {name}, for whose attention sinks there is "
                "no kernel; use auto"
            )
        changes["attention"] = "einsum"
    return dataclasses.replace(config, **changes)


def _read_turnings(hf: Mapping[str, Any], name: str, size: int, positions: int):
    if name == "gpt_oss" and not (hf.get("rope_parameters") or hf.get("rope_scaling")):
        hf = {**hf, "rope_parameters": GPT_OSS_ROPE}
    if name != "gemma3_text":
        return (read_rotary(hf, size, positions, theta=read_type(hf)[1].theta),) * 2
    thetas = 1e6, 1e4  # defaults of global and of local layers
    pairs = zip(LAYER_TYPES, thetas, strict=True)
    return tuple(read_rotary(hf, size, positions, kind=k, theta=theta) for k, theta in pairs)
