"""Prefixes: keys and values in the layers, where they are and how they are computed."""

import re
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.errors import InputError, brief
from jaxprompt.parallel.sharding import constrain
from jaxprompt.types import Dims, Prefix


class PrefixSpec(NamedTuple):
    """The stream, length and layers of one prefix."""

    name: str  # the prefix of its parameters' names
    stream: str  # of Injection
    length: int
    first: int  # layer
    last: int  # exclusive
    layers: int  # of the stack
    has_positions: bool  # in a relative bias


def prefix_specs(dims: Dims, shift: bool, **requested: tuple[int, str]) -> list[PrefixSpec]:
    """Returns the requested prefixes, given by stream: a length and an interval of layers.

    A length of 0 is no prefix; `shift` gives prefixes positions in a relative bias, which the
    attention over an encoder's output does not have.

    Raises:
      InputError: if an interval is malformed, exceeds the model's layers, or has no length.
    """
    specs = []
    for stream, (length, layers) in requested.items():
        is_encoder = stream == "encoder"
        name, field = ("", "length") if is_encoder else (f"{stream}_", stream)
        num_layers = dims.layers if is_encoder else dims.decoder_layers
        if layers and not length:
            raise InputError(f"prompt.{name}layers={layers!r} needs prompt.{field} above 0")
        interval = parse_layers(layers, num_layers, f"{name}layers")
        if length:
            has_positions = shift and stream != "cross"
            specs.append(PrefixSpec(name, stream, length, *interval, num_layers, has_positions))
    return specs


def parse_layers(text: str, num_layers: int, field: str = "layers") -> tuple[int, int]:
    """Parses a layer interval "17-24" (one-based, inclusive; "" = all) as a half-open range.

    Raises:
      InputError: if it is malformed or exceeds the model's layers.
    """
    if not text:
        return 0, num_layers
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    first, last = (int(end or match[1]) for end in match.groups()) if match else (0, 0)
    if not 1 <= first <= last <= num_layers:
        raise InputError(
            f"prompt.{field}={brief(text)} must be FIRST-LAST within 1-{num_layers}, e.g. 17-24, "
            "or empty"
        )
    return first - 1, last


def make_prefix(k, v, first: int, layers: int, has_positions: bool) -> Prefix:
    """Returns a prefix with keys and values for layers from `first` on; other layers are masked.

    [num_given, B|1, P, N, D] x 2 -> [L, B|1, P, N, D] x 2. `has_positions` gives them the positions
    0 .. P - 1 in a relative bias.
    """
    num_given, _, length = k.shape[:3]
    padding = [(first, layers - first - num_given)] + [(0, 0)] * 4
    layer_indices = np.arange(layers)
    # The padding must be masked: attention to a zero key has weight too.
    mask = (layer_indices >= first) & (layer_indices < first + num_given)
    mask = np.broadcast_to(mask[:, None, None], (layers, 1, length))  # numpy: known when compiling
    positions = jnp.arange(length) if has_positions else None
    k, v = (
        constrain(jnp.pad(x, padding), None, "act_batch", None, "act_heads", None) for x in (k, v)
    )
    return Prefix(k, v, mask, positions)


def vectors_to_prefix(
    vectors, is_present, interval: tuple[int, int], dims: Dims, has_positions: bool, shared_kv=None
) -> Prefix:
    """Reshapes vectors of texts to the keys and values of the layers `interval`, half-open.

    [B, P, 2 * N * D], bool [B, P] -> k, v [L, B, P, N, D]. They are added to `shared_kv`
    [L, 2, P, N, D], which all texts share; without it absent vectors are masked.
    """
    first, last = interval
    pairs = vectors.reshape(*vectors.shape[:2], 2, dims.heads, dims.head_dim)
    # Zero, so that a text without words has the shared keys and values.
    pairs = jnp.where(is_present[..., None, None, None], pairs, 0.0)  # [B, P, 2, N, D]
    k, v = (jnp.broadcast_to(pairs[:, :, i], (last - first, *pairs[:, :, i].shape)) for i in (0, 1))
    prefix = make_prefix(k, v, first, dims.layers, has_positions)
    if shared_kv is None:
        return prefix._replace(mask=prefix.mask & is_present)
    # In numpy, so that `layer_segments` knows when compiling that all layers have the prefix.
    everywhere = np.ones((dims.layers, 1, shared_kv.shape[2]), bool)
    return prefix._replace(
        k=prefix.k + shared_kv[:, :1], v=prefix.v + shared_kv[:, 1:], mask=everywhere
    )


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
    shape = (*k.shape[:2], prefix.k.shape[2], *k.shape[3:])
    return Prefix(
        jnp.concatenate([jnp.broadcast_to(prefix.k, shape).astype(k.dtype), k], axis=2),
        jnp.concatenate([jnp.broadcast_to(prefix.v, shape).astype(v.dtype), v], axis=2),
        mask,
    )


def append_to_mask(prefix: Prefix | None, layers: int, mask):
    """Returns the mask of `append_to_prefix`. bool [B, T] -> bool [L, B, P + T]"""
    masks = [mask] if prefix is None else [mask, prefix.mask]
    xp = np if all(isinstance(x, np.ndarray) for x in masks) else jnp
    mask = xp.broadcast_to(mask, (layers, *mask.shape))
    if prefix is None:
        return mask
    prefix_mask = xp.broadcast_to(prefix.mask, (*mask.shape[:2], prefix.k.shape[2]))
    return xp.concatenate([prefix_mask, mask], axis=2)
