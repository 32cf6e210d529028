"""The share of attention on a prompt, by layer and head, for inspection.

The backbone's modules run as they are. For each attention, the probabilities are computed
separately by the plain product of queries and keys, and summed over the columns of the prompt.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.layers.attention import MultiHead
from jaxprompt.layers.stack import WATCHED
from jaxprompt.models.model import Model, place
from jaxprompt.tree import Params
from jaxprompt.types import Batch, Injection, Stream, Tokens

# A left-to-right model's own attention is its encoder's, that of what a GLM writes its decoder's.
STREAMS = ("encoder", "decoder", "cross")


class PromptAttention(NamedTuple):
    """Shares of the attention on a prompt, in one kind of attention of a model."""

    tokens: Any  # float32 [B, L, N] mean over the queries that are real tokens, no soft ones
    read: Any  # float32 [B, L, N] of the query at the position that the head reads first
    even: Any  # float32 [B] what attention that is the same on all that is seen would give


class _Call(NamedTuple):
    """One attention as it was called."""

    probs: Any  # [B, N, T, S]
    seen: Any  # bool [B, T, S]


def attend_prompt(model: Model, params: Params, batch: Batch) -> dict[str, PromptAttention]:
    """Runs a batch and measures the attention on the prompt, by `STREAMS`; pure, for jit.

    The columns of a prompt are its prefix keys and its soft tokens in the attended text. Streams
    whose attention has neither are left out. The encoder's read position is NaN if a decoder is
    read. Returns {} for a backbone whose layers do not use `layers.attention`.
    """
    injection = model.inject(params, batch)
    batch, calls = place(batch, injection), []

    def watch(next_call, args, kwargs, context):
        module = context.module
        if not isinstance(module, MultiHead) or context.method_name != "__call__":
            return next_call(*args, **kwargs)
        # What follows is a bias, a table of distances or turns, by kind of attention.
        x, k, _, seen, *bias = args
        probs = module.attention_weights(x, k, seen, *bias)
        mask = seen.mask if seen.mask.ndim == 3 else seen.mask[:, None]
        calls.append(_Call(probs, jnp.broadcast_to(mask, (len(x), *probs.shape[2:]))))
        return next_call(*args, **kwargs)

    # Unrolled and never recomputed, so that what a layer gives besides can leave it.
    cfg = dataclasses.replace(model.backbone.cfg, stack="unroll", remat=WATCHED)
    if "mask_decoder" in cfg.model_heads:  # the layers are the encoder's own
        cfg = dataclasses.replace(cfg, decodes=False)
    with nn.intercept_methods(watch):
        model.backbone.clone(cfg=cfg).apply(
            {"params": params["backbone"]}, batch, _everywhere(injection), deterministic=True
        )
    return _sort(model, batch, injection, calls)


def _everywhere(injection: Injection) -> Injection:
    """Makes masks of prefixes arrays, with which no stack is cut where a prefix begins or ends."""
    found = {}
    for name in STREAMS:
        stream: Stream = getattr(injection, name)
        if stream.prefix is not None:
            mask = jnp.asarray(stream.prefix.mask)
            stream = stream._replace(prefix=stream.prefix._replace(mask=mask))
        found[name] = stream
    return injection._replace(**found)


def _sort(
    model: Model, batch: Batch, injection: Injection, calls: list[_Call]
) -> dict[str, PromptAttention]:
    """Divides attentions among the streams: layers in order, a decoder's own before its other."""
    dims, decodes = model.backbone.dims, batch.decoder is not None
    # A GLM's layers run again over what it writes, and see the prompt and the input in front.
    again = decodes and not dims.decoder_layers
    above = calls[dims.layers :]
    if len(above) != (dims.layers if again else 2 * dims.decoder_layers * decodes):
        return {}
    own = {"encoder": calls[: dims.layers]}
    own |= {"decoder": above} if again else {"decoder": above[::2], "cross": above[1::2]}
    found = {}
    for name, layers in own.items():
        if not layers:
            continue
        queries = batch.encoder if name == "encoder" else batch.decoder_tokens
        prefix = getattr(injection, "encoder" if again else name).prefix
        with_own = name == "decoder" and not again
        slots = injection.decoder.slots if with_own else injection.encoder.slots
        if prefix is None and slots is None:
            continue
        is_prompt = (batch.decoder_tokens if with_own else batch.encoder).slot >= 0  # [B, S]
        if again and name == "decoder":
            is_prompt = jnp.concatenate([is_prompt, batch.decoder_tokens.slot >= 0], axis=1)
        if prefix is not None:
            front = jnp.ones((len(is_prompt), prefix.k.shape[2]), bool)
            is_prompt = jnp.concatenate([front, is_prompt], axis=1)  # [B, P+S]
        # Where there is a decoder the head reads it alone, and so no query of the encoder.
        reads = batch.label_pos[:, 0] if (name != "encoder") == decodes else None
        found[name] = _measure(layers, is_prompt, queries, reads)
    return found


def _measure(layers: list[_Call], is_prompt, queries: Tokens, reads) -> PromptAttention:
    asks = queries.mask & (queries.slot < 0)  # [B, T]
    count = jnp.maximum(asks.sum(-1), 1)
    tokens, read, even = [], [], []
    for probs, seen in layers:
        mass = jnp.where(is_prompt[:, None, None], probs, 0.0).sum(-1)  # [B, N, T]
        tokens.append(jnp.where(asks[:, None], mass, 0.0).sum(-1) / count[:, None])  # [B, N]
        if reads is None:
            read.append(jnp.full_like(tokens[-1], jnp.nan))
        else:
            read.append(jnp.take_along_axis(mass, reads[:, None, None], axis=2)[..., 0])
        share = (seen & is_prompt[:, None]).sum(-1) / jnp.maximum(seen.sum(-1), 1)  # [B, T]
        even.append(jnp.where(asks, share, 0.0).sum(-1) / count)
    # Layers without a prefix hide its columns: theirs is no share of what is seen.
    return PromptAttention(jnp.stack(tokens, 1), jnp.stack(read, 1), jnp.stack(even, 1).max(1))
