"""Hides words of a text, and fills masks, on the device: what an objective of a method may see."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxprompt.types import Array, Role, Tokens


class Hidden(NamedTuple):
    """Tokens with some of their text hidden."""

    tokens: Tokens  # [B, T]
    places: Array  # int32 [B, M] the columns that were picked
    targets: Array  # int32 [B, M] what stood there, -1 = it was not hidden


def hide_text(tokens: Tokens, key: Array, *, share: float, mask: int) -> Hidden:
    """Puts the mask's id in the place of a share of the text, and of one token at least.

    Each token of Role.TEXT is hidden with probability `share`, whatever the others; a share of 0
    hides one. Other roles, and padding, stay. At most twice the share of T are hidden, so that M
    is fixed: max(1, ceil(2 * share * T)).
    """
    rows, length = tokens.ids.shape
    text = (tokens.roles == Role.TEXT) & tokens.mask
    # 2.0 is above every draw: what is no text comes last and is never chosen.
    chance = jnp.where(text, jax.random.uniform(key, (rows, length)), 2.0)  # [B, T]
    most = min(length, max(1, math.ceil(2 * share * length)))
    places = jnp.argsort(chance, axis=1)[:, :most]  # [B, M], the least chances first
    least = jnp.take_along_axis(chance, places, axis=1)
    # The first place is taken whatever its chance, unless the row has no text at all.
    chosen = (least < share) | ((jnp.arange(most) == 0) & (least < 2.0))
    targets = jnp.where(chosen, jnp.take_along_axis(tokens.ids, places, axis=1), -1)
    hidden = jnp.zeros(text.shape, bool).at[jnp.arange(rows)[:, None], places].set(chosen)
    ids = jnp.where(hidden, mask, tokens.ids)
    return Hidden(tokens._replace(ids=ids), places, targets)


def fill_masks(tokens: Tokens, places: Array, field: str, values: Array) -> Tokens:
    """Writes `values` [B, M] into a field, ids or slot, at the columns `places` [B, M] of each row.

    A place of value -1 is taken out of its row: nothing attends to it, and what follows moves up by
    a position, so that the row reads as one that never had the place. Of each row the first place
    has a value.
    """
    rows = jnp.arange(len(places))[:, None]
    put = lambda x, new: jnp.asarray(x).at[rows, places].set(new)
    gone = put(jnp.zeros(tokens.mask.shape, bool), values < 0)  # [B, T]
    mask = tokens.mask & ~gone
    old = jnp.take_along_axis(getattr(tokens, field), places, axis=1)
    return tokens._replace(
        mask=mask,
        positions=jnp.where(mask, tokens.positions - gone.cumsum(1), 0),
        roles=jnp.where(gone, Role.PAD, tokens.roles),
        # With a place of several taken out what is left does not stand in front.
        lengths=tokens.lengths if places.shape[1] == 1 else None,
        **{field: put(getattr(tokens, field), jnp.where(values < 0, old, values))},
    )
