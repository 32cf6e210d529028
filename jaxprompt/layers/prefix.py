"""Prefixes: keys and values in the layers, their places and how they are computed."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.errors import InputError, brief
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import Dims, Prefix


class PrefixSpec(NamedTuple):
    """The place of the prefix of one attention."""

    name: str  # what its parameters begin with
    stream: str  # of Injection
    length: int
    first: int  # layer
    last: int  # behind its last layer
    layers: int  # of the stack
    inside: bool  # of a relative bias


def prefix_specs(dims: Dims, shift: bool, **asked: tuple[int, str]) -> list[PrefixSpec]:
    """Returns the places of the requested prefixes, by stream: a length and an interval of layers.

    A length of 0 is no prefix; `shift` gives prefixes positions in a relative bias, which the
    attention over an encoder's output does not have.

    Raises:
      InputError: if an interval is malformed, exceeds the model's layers, or has no length.
    """
    found = []
    for stream, (length, layers) in asked.items():
        encodes = stream == "encoder"
        name, field = ("", "length") if encodes else (f"{stream}_", stream)
        total = dims.layers if encodes else dims.decoder_layers
        if layers and not length:
            raise InputError(f"prompt.{name}layers={layers!r} needs prompt.{field} above 0")
        span = parse_layers(layers, total, f"{name}layers")
        if length:
            found.append(
                PrefixSpec(name, stream, length, *span, total, shift and stream != "cross")
            )
    return found


def parse_layers(text: str, total: int, field: str = "layers") -> tuple[int, int]:
    """Parses a layer interval "17-24" (one-based, inclusive; "" = all) as a half-open range.

    Raises:
      InputError: if it is malformed or exceeds the model's layers.
    """
    if not text:
        return 0, total
    ends = text.split("-")
    try:
        if len(ends) > 2 or not all(map(str.isdecimal, ends)):
            raise ValueError(text)
        low, high = int(ends[0]), int(ends[-1])  # which raises ValueError for thousands of digits
    except ValueError as error:
        raise InputError(
            f"prompt.{field}={brief(text)} must be FIRST-LAST, e.g. 17-24, or empty"
        ) from error
    if not 1 <= low <= high:
        raise InputError(f"prompt.{field}={text!r} must be FIRST-LAST with 1 <= FIRST <= LAST")
    if high > total:
        raise InputError(f"prompt.{field}={text!r} must be FIRST-LAST within 1-{total}")
    return low - 1, high


def make_prefix(k, v, first: int, layers: int, inside: bool) -> Prefix:
    """Places the keys and values of layers from `first` on; all other `layers` are masked.

    [few, B|1, P, N, D] x 2 -> [L, B|1, P, N, D] x 2. `inside` gives them the positions 0 .. P - 1
    in a relative bias.
    """
    few, _, length = k.shape[:3]
    outside = [(first, layers - first - few)] + [(0, 0)] * 4  # masked: a zero key still takes mass
    number = np.arange(layers)
    mask = (number >= first) & (number < first + few)
    mask = np.broadcast_to(mask[:, None, None], (layers, 1, length))  # numpy: known when compiling
    positions = jnp.arange(length) if inside else None
    k, v = (
        constrain(jnp.pad(x, outside), None, "act_batch", None, "act_heads", None) for x in (k, v)
    )
    return Prefix(k, v, mask, positions)


def vectors_to_prefix(
    vectors, there, span: tuple[int, int], dims: Dims, inside: bool, task=None
) -> Prefix:  # fmt: skip
    """Turns vectors of texts into the keys and values of the layers `span`, half-open.

    [B, P, 2 * N * D], bool [B, P] -> k, v [L, B, P, N, D]. With `task` [L, 2, P, N, D] they are
    added to these, which all texts have; without it missing vectors are masked.
    """
    first, last = span
    pairs = vectors.reshape(*vectors.shape[:2], 2, dims.heads, dims.head_dim)
    # Zero, so that the task's own keys stay as they are where a text has no word.
    pairs = jnp.where(there[..., None, None, None], pairs, 0.0)  # [B, P, 2, N, D]
    k, v = (jnp.broadcast_to(pairs[:, :, i], (last - first, *pairs[:, :, i].shape)) for i in (0, 1))
    own = make_prefix(k, v, first, dims.layers, inside)
    if task is None:
        return own._replace(mask=own.mask & there)
    # In numpy, so that `segments` knows when compiling that no layer is without it.
    everywhere = np.ones((dims.layers, 1, task.shape[2]), bool)
    return own._replace(k=own.k + task[:, :1], v=own.v + task[:, 1:], mask=everywhere)


class PrefixMlp(nn.Module):
    """Computes keys and values from embeddings (Liu et al. 2022, section 3.3). -> [L, 2, P, N, D]

    Two layers, tanh between them, serve all layers of the backbone.
    """

    shape: tuple[int, int, int, int, int]
    width: int  # of the embeddings
    hidden: int
    scale: float  # standard deviation of the initial values

    @nn.compact
    def __call__(self):
        """Computes keys and values."""
        layers, two, length, heads, head_dim = self.shape
        draw = nn.initializers.normal(self.scale)
        embeds = self.param("rows", draw, (length, self.width))  # [P, H]
        inner = jnp.tanh(nn.Dense(self.hidden, kernel_init=draw, name="down")(embeds))
        # N * D need not be H.
        flat = nn.Dense(layers * two * heads * head_dim, kernel_init=draw, name="up")(inner)
        table = flat.reshape(length, layers, two, heads, head_dim)
        return table.transpose(1, 2, 0, 3, 4)


def append_to_prefix(prefix: Prefix | None, k, v, mask) -> Prefix:
    """Appends keys and values after a prefix. [L, B, T, N, D] x 2, bool [B, T] -> P + T columns

    The mask is a numpy array if both masks are. There are no positions.
    """
    mask = append_to_mask(prefix, k.shape[0], mask)
    if prefix is None:
        return Prefix(k, v, mask)
    spread = (*k.shape[:2], prefix.k.shape[2], *k.shape[3:])
    return Prefix(
        jnp.concatenate([jnp.broadcast_to(prefix.k, spread).astype(k.dtype), k], axis=2),
        jnp.concatenate([jnp.broadcast_to(prefix.v, spread).astype(v.dtype), v], axis=2),
        mask,
    )


def append_to_mask(prefix: Prefix | None, layers: int, mask):
    """Returns the mask of `append_to_prefix`. bool [B, T] -> bool [L, B, P + T]"""
    known = isinstance(mask, np.ndarray) and (prefix is None or isinstance(prefix.mask, np.ndarray))
    xp = np if known else jnp
    mask = xp.broadcast_to(mask, (layers, *mask.shape))
    if prefix is None:
        return mask
    there = xp.broadcast_to(prefix.mask, (*mask.shape[:2], prefix.k.shape[2]))
    return xp.concatenate([there, mask], axis=2)
