"""Hides words of a text and fills masks, on the device, for the objectives of methods."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxprompt.types import Array, Role, Tokens


class MaskedText(NamedTuple):
    """Tokens with some of their text hidden."""

    tokens: Tokens  # [B, T]
    places: Array  # int32 [B, M] the columns that were picked
    targets: Array  # int32 [B, M] what stood there, -1 = it was not hidden


def mask_text(tokens: Tokens, key: Array, *, share: float, mask: int) -> MaskedText:
    """Replaces a share of the text, at least one token, by the mask's id.

    Each token of Role.TEXT is hidden independently with probability `share`; a share of 0 hides
    one. Other roles and padding stay. At most twice the share of a text is hidden, so that M is
    fixed: max(1, ceil(2 * share * T)). Padding after a text changes nothing, with JAX's default
    generator.
    """
    rows, length = tokens.ids.shape
    text = (tokens.roles == Role.TEXT) & tokens.mask
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (length,)))(keys)
    # 2.0 is above every draw: what is no text comes last and is never chosen.
    chance = jnp.where(text, uniform, 2.0)  # [B, T]
    most = min(length, max(1, math.ceil(2 * share * length)))
    limit = jnp.ceil(2 * share * text.sum(1, keepdims=True))  # [B, 1]
    places = jnp.argsort(chance, axis=1)[:, :most]  # [B, M], the least chances first
    least = jnp.take_along_axis(chance, places, axis=1)
    # The first place is taken whatever its chance, unless the row has no text at all.
    number = jnp.arange(most)
    chosen = (least < share) & (number < limit) | (number == 0) & (least < 2.0)
    targets = jnp.where(chosen, jnp.take_along_axis(tokens.ids, places, axis=1), -1)
    hidden = jnp.zeros(text.shape, bool).at[jnp.arange(rows)[:, None], places].set(chosen)
    ids = jnp.where(hidden, mask, tokens.ids)
    return MaskedText(tokens._replace(ids=ids), places, targets)


def fill_masks(tokens: Tokens, places: Array, field: str, values: Array) -> tuple[Tokens, Array]:
    """Writes `values` [B, M] into a field, ids or slot, at the columns `places` [B, M] of each row.

    A place with value -1 is removed from its row: later tokens move up, as if the place had never
    been there, and padding is added at the end. The first place of each row has a value. Returns
    the tokens, and the new column of each one, int32 [B, T].
    """
    rows = jnp.arange(len(places))[:, None]
    put = lambda x, new: jnp.asarray(x).at[rows, places].set(new)
    old = jnp.take_along_axis(getattr(tokens, field), places, axis=1)
    tokens = tokens._replace(
        **{field: put(getattr(tokens, field), jnp.where(values < 0, old, values))}
    )
    columns = jnp.broadcast_to(jnp.arange(tokens.ids.shape[1], dtype=jnp.int32), tokens.ids.shape)
    if places.shape[1] == 1:
        return tokens, columns
    gone = put(jnp.zeros(tokens.mask.shape, bool), values < 0)  # [B, T]
    mask = tokens.mask & ~gone
    closed = tokens._replace(
        mask=mask,
        positions=jnp.where(mask, tokens.positions - gone.cumsum(1), 0),
        roles=jnp.where(gone, Role.PAD, tokens.roles),
        lengths=None,
    )
    order = jnp.argsort(~mask, axis=1, stable=True)
    closed = jax.tree.map(lambda x: jnp.take_along_axis(x, order, axis=1), closed)
    lengths = None if tokens.lengths is None else mask.sum(1, dtype=jnp.int32)
    return closed._replace(lengths=lengths), jnp.argsort(order, axis=1).astype(jnp.int32)
