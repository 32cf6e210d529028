"""The keys and values of a text in the model itself, to initialise a prefix from."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.layers.attention import MultiHead
from jaxprompt.layers.stack import WATCHED
from jaxprompt.types import Array, Batch, Injection, Role, Tokens


def text_keys(backbone: nn.Module, params: Any, ids: jax.Array) -> dict[str, tuple[Array, Array]]:
    """Runs a text through a backbone. int [P] -> k, v [L, P, N, D] of each attention, by stream

    `params` are the backbone's. An encoder-decoder reads the text on both sides: "decoder" is the
    decoder's self-attention, "cross" its attention to the encoder's output.
    """
    # Unrolled, so that each projection is recorded once, in order.
    cfg = dataclasses.replace(backbone.cfg, stack="unroll", remat=WATCHED)
    keys: list[tuple[Array, Array]] = []

    def record(call, args, kwargs, context):
        output = call(*args, **kwargs)
        if isinstance(context.module, MultiHead) and context.method_name == "keys":
            keys.append(output)
        return output

    decodes = backbone.dims.decoder_layers
    with nn.intercept_methods(record):
        backbone.clone(cfg=cfg).apply(
            {"params": params}, _batch_of(ids, decodes > 0), Injection(), deterministic=True
        )
    layers = backbone.dims.layers
    parts = {"encoder": keys[:layers]}
    if decodes:
        # Each layer of the decoder calls its self-attention before its cross-attention.
        parts |= {"decoder": keys[layers::2], "cross": keys[layers + 1 :: 2]}
    return {stream: _stacked(layers) for stream, layers in parts.items()}


def _stacked(layers: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    k, v = zip(*layers, strict=True)
    return jnp.stack(k)[:, 0], jnp.stack(v)[:, 0]


def _batch_of(ids: jax.Array, decodes: bool) -> Batch:
    ids = ids[None].astype(jnp.int32)
    number, one = jnp.arange(ids.shape[1])[None], jnp.zeros(1, jnp.int32)
    tokens = Tokens(
        ids, ids >= 0, jnp.full_like(ids, -1), number, 0 * ids, jnp.full_like(ids, Role.TEXT)
    )
    return Batch(tokens, ids[:, :1], one, jnp.ones(1), one, tokens if decodes else None)
