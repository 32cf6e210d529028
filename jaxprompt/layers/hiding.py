"""Hides words of a text, on the device: what an objective of a method may ask to be predicted."""

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
