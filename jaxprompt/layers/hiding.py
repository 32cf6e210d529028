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
    targets: Array  # int32 [B, M] the original ids, -1 = it was not hidden


def mask_text(tokens: Tokens, key: Array, *, share: float, mask: int) -> MaskedText:
    """Replaces a share of the text, at least one token, by the mask's id.

    Each token of Role.TEXT is hidden independently with probability `share`; a share of 0 hides
    one. Other roles and padding stay. At most twice the share of a text is hidden, so that M is
    fixed: max(1, ceil(2 * share * T)). Padding after a text changes nothing, with JAX's default
    generator.
    """
    rows, length = tokens.ids.shape
    is_text = (tokens.roles == Role.TEXT) & tokens.mask
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (length,)))(keys)
    # 2.0 is above every sample, so other tokens than text come last and are never chosen.
    priority = jnp.where(is_text, uniform, 2.0)  # [B, T]
    max_hidden = min(length, max(1, math.ceil(2 * share * length)))
    limit = jnp.ceil(2 * share * is_text.sum(1, keepdims=True))  # [B, 1]
    places = jnp.argsort(priority, axis=1)[:, :max_hidden]  # [B, M], lowest priorities first
    chosen_priority = jnp.take_along_axis(priority, places, axis=1)
    # The first place is always hidden, unless the row has no text.
    rank = jnp.arange(max_hidden)
    is_hidden = (chosen_priority < share) & (rank < limit) | (rank == 0) & (chosen_priority < 2.0)
    targets = jnp.where(is_hidden, jnp.take_along_axis(tokens.ids, places, axis=1), -1)
    is_hidden_column = jnp.zeros(is_text.shape, bool)
    is_hidden_column = is_hidden_column.at[jnp.arange(rows)[:, None], places].set(is_hidden)
    ids = jnp.where(is_hidden_column, mask, tokens.ids)
    return MaskedText(tokens._replace(ids=ids), places, targets)


def fill_masks(tokens: Tokens, places: Array, field: str, values: Array) -> tuple[Tokens, Array]:
    """Writes `values` [B, M] into a field, ids or slot, at the columns `places` [B, M] of each row.

    A place with value -1 is removed from its row: later tokens move up, as if the place had never
    been there, and padding is added at the end. The first place of each row has a value. Returns
    the tokens, and the new column of each one, int32 [B, T].
    """
    rows = jnp.arange(len(places))[:, None]

    def write(x, new):
        return jnp.asarray(x).at[rows, places].set(new)

    old = jnp.take_along_axis(getattr(tokens, field), places, axis=1)
    tokens = tokens._replace(
        **{field: write(getattr(tokens, field), jnp.where(values < 0, old, values))}
    )
    columns = jnp.broadcast_to(jnp.arange(tokens.ids.shape[1], dtype=jnp.int32), tokens.ids.shape)
    if places.shape[1] == 1:
        return tokens, columns
    is_removed = write(jnp.zeros(tokens.mask.shape, bool), values < 0)  # [B, T]
    mask = tokens.mask & ~is_removed
    closed_up = tokens._replace(
        mask=mask,
        positions=jnp.where(mask, tokens.positions - is_removed.cumsum(1), 0),
        roles=jnp.where(is_removed, Role.PAD, tokens.roles),
        lengths=None,
    )
    order = jnp.argsort(~mask, axis=1, stable=True)
    closed_up = jax.tree.map(lambda x: jnp.take_along_axis(x, order, axis=1), closed_up)
    lengths = None if tokens.lengths is None else mask.sum(1, dtype=jnp.int32)
    return closed_up._replace(lengths=lengths), jnp.argsort(order, axis=1).astype(jnp.int32)
