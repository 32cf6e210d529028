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
from jaxprompt.models.model import Model, without_absent_slots
from jaxprompt.tree import Params
from jaxprompt.types import Batch, Injection, Stream, Tokens

# The attention of a left-to-right model is "encoder"; that of a GLM's output is "decoder".
STREAMS = ("encoder", "decoder", "cross")


class PromptAttention(NamedTuple):
    """Shares of the attention on a prompt, in one kind of attention of a model."""

    tokens: Any  # float32 [B, L, N] mean over queries that are neither padding nor soft tokens
    read: Any  # float32 [B, L, N] of the query at the first position that the head reads
    uniform: Any  # float32 [B] of uniform attention


class _Call(NamedTuple):
    """The result of one attention."""

    probs: Any  # [B, N, T, S]
    seen: Any  # bool [B, T, S]


def attend_prompt(model: Model, params: Params, batch: Batch) -> dict[str, PromptAttention]:
    """Runs a batch and measures the attention on the prompt, by `STREAMS`; pure, for jit.

    The columns of a prompt are its prefix keys and its soft tokens in the attended text. Streams
    whose attention has neither are left out. The encoder's read position is NaN if a decoder is
    read. Returns {} for a backbone whose layers do not use `layers.attention`.
    """
    injection = model.inject(params, batch)
    batch, calls = without_absent_slots(batch, injection), []

    def watch(next_call, args, kwargs, context):
        module = context.module
        if not isinstance(module, MultiHead):
            return next_call(*args, **kwargs)
        if context.method_name == "attend_to_source":
            x, source, seen, *bias = args
            k = module.key(source)
        elif context.method_name == "__call__":
            # The other arguments depend on the kind of attention, e.g. a bias or rotations.
            x, k, _, seen, *bias = args
        else:
            return next_call(*args, **kwargs)
        probs = module.attention_weights(x, k, seen, *bias)
        mask = seen.mask if seen.mask.ndim == 3 else seen.mask[:, None]
        calls.append(_Call(probs, jnp.broadcast_to(mask, (len(x), *probs.shape[2:]))))
        return next_call(*args, **kwargs)

    # Unrolled and never recomputed, so that probabilities can leave a layer.
    cfg = dataclasses.replace(model.backbone.cfg, stack="unroll", remat=WATCHED)
    if "mask_decoder" in cfg.model_heads:  # the layers of the encoder
        cfg = dataclasses.replace(cfg, decodes=False)
    with nn.intercept_methods(watch):
        model.backbone.clone(cfg=cfg).apply(
            {"params": params["backbone"]}, batch, _with_traced_masks(injection), deterministic=True
        )
    return _by_stream(model, batch, injection, calls)


def _with_traced_masks(injection: Injection) -> Injection:
    """Makes the masks of prefixes traced arrays, with which a stack is not split at a prefix."""
    streams = {}
    for name in STREAMS:
        stream: Stream = getattr(injection, name)
        if stream.prefix is not None:
            mask = jnp.asarray(stream.prefix.mask)
            stream = stream._replace(prefix=stream.prefix._replace(mask=mask))
        streams[name] = stream
    return injection._replace(**streams)


def _by_stream(
    model: Model, batch: Batch, injection: Injection, calls: list[_Call]
) -> dict[str, PromptAttention]:
    """Divides attentions among the streams; a decoder's layer calls self-attention first."""
    dims, decodes = model.backbone.dims, batch.decoder is not None
    # A GLM's layers run again over its output, which attends to the prompt and the input.
    runs_twice = decodes and not dims.decoder_layers
    later_calls = calls[dims.layers :]
    if len(later_calls) != (dims.layers if runs_twice else 2 * dims.decoder_layers * decodes):
        return {}
    calls_of = {"encoder": calls[: dims.layers]}
    if runs_twice:
        calls_of["decoder"] = later_calls
    else:
        calls_of |= {"decoder": later_calls[::2], "cross": later_calls[1::2]}
    shares = {}
    for name, layers in calls_of.items():
        if not layers:
            continue
        queries = batch.encoder if name == "encoder" else batch.decoder_tokens
        prefix = getattr(injection, "encoder" if runs_twice else name).prefix
        is_decoder = name == "decoder" and not runs_twice
        slots = injection.decoder.slots if is_decoder else injection.encoder.slots
        if prefix is None and slots is None:
            continue
        is_prompt = (batch.decoder_tokens if is_decoder else batch.encoder).slot >= 0  # [B, S]
        if runs_twice and name == "decoder":
            is_prompt = jnp.concatenate([is_prompt, batch.decoder_tokens.slot >= 0], axis=1)
        if prefix is not None:
            prefix_columns = jnp.ones((len(is_prompt), prefix.k.shape[2]), bool)
            is_prompt = jnp.concatenate([prefix_columns, is_prompt], axis=1)  # [B, P+S]
        # The head only reads the decoder, if there is one.
        reads = batch.label_pos[:, 0] if (name != "encoder") == decodes else None
        shares[name] = _measure(layers, is_prompt, queries, reads)
    return shares


def _measure(layers: list[_Call], is_prompt, queries: Tokens, reads) -> PromptAttention:
    is_query = queries.mask & (queries.slot < 0)  # [B, T]
    count = jnp.maximum(is_query.sum(-1), 1)
    tokens, read, uniform = [], [], []
    for probs, seen in layers:
        mass = jnp.where(is_prompt[:, None, None], probs, 0.0).sum(-1)  # [B, N, T]
        tokens.append(jnp.where(is_query[:, None], mass, 0.0).sum(-1) / count[:, None])  # [B, N]
        if reads is None:
            read.append(jnp.full_like(tokens[-1], jnp.nan))
        else:
            read.append(jnp.take_along_axis(mass, reads[:, None, None], axis=2)[..., 0])
        share = (seen & is_prompt[:, None]).sum(-1) / jnp.maximum(seen.sum(-1), 1)  # [B, T]
        uniform.append(jnp.where(is_query, share, 0.0).sum(-1) / count)
    # In layers without a prefix its columns are masked.
    return PromptAttention(jnp.stack(tokens, 1), jnp.stack(read, 1), jnp.stack(uniform, 1).max(1))
