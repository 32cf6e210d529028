"""Combines the injections of several methods into one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxprompt.errors import InputError
from jaxprompt.layers.prefix import parse_layers
from jaxprompt.types import Array, Batch, Dims, Injection, Prefix, Stream

# The fields of a method that give the prefix of each stream its length, its shift of positions (a
# flag, of a constant the number) and its layers.
_FIELDS = {
    "encoder": (("length",), ("shift",), "layers"),
    "decoder": (("decoder", "decoder_length"), ("shift_decoder", "shift"), "decoder_layers"),
    "cross": (("cross", "cross_length"), (), "cross_layers"),
}

_RAISED = 1 << 30  # above every index of a soft token


class SlotCounts(NamedTuple):
    """The number of soft tokens of one method, and of all methods together."""

    placed: int  # that the template places
    decoder: int  # in what the decoder is fed
    total: int  # that the template places of all; behind them is what a method has beyond


def join_injections(parts: Sequence[Injection], rows: Sequence[SlotCounts]) -> Injection:
    """Concatenates soft tokens and prefixes; vectors beyond the template's slots come last."""
    encoder = _join_streams([part.encoder for part in parts], [own.placed for own in rows])
    decoder = _join_streams([part.decoder for part in parts], [own.decoder for own in rows])
    cross = _join_streams([part.cross for part in parts], [0] * len(parts))
    # At most one part has rows for the head.
    (trained, *_) = [*(part.rows for part in parts if part.rows is not None), None]
    return Injection(encoder, decoder, cross, trained)


def renumber_slots(
    view: Callable[[Batch, jnp.ndarray], Batch], rows: SlotCounts, batch: Batch, key: jnp.ndarray
) -> Batch:
    """Applies a method's view of a batch, and renumbers the slots that it writes.

    The slots of the template are numbered over all methods, and keep their numbers wherever the
    view moves them. Slots that the view itself writes count only the method's soft tokens; those
    beyond the template's start after `rows.total`.
    """
    placed = batch.encoder.slot
    raised = jnp.where(placed >= 0, placed + _RAISED, placed)
    seen = view(batch._replace(encoder=batch.encoder._replace(slot=raised)), key)
    slot = seen.encoder.slot
    written = jnp.where(slot >= 0, slot - rows.placed + rows.total, slot)
    slot = jnp.where(slot >= _RAISED, slot - _RAISED, written)
    return seen._replace(encoder=seen.encoder._replace(slot=slot))


def _join_streams(streams: Sequence[Stream], counts: Sequence[int]) -> Stream:
    pairs = [(own, n) for own, n in zip(streams, counts, strict=True) if own.slots is not None]
    slots = mask = None
    if pairs:
        # What the template places comes first, of all parts: it is numbered from 0 on.
        cut = lambda of: [of(own)[:, :n] for own, n in pairs] + [of(own)[:, n:] for own, n in pairs]
        slots = _beside(cut(lambda own: own.slots))
        if any(own.slots_mask is not None for own, _ in pairs):
            mask = _beside(cut(_mask_of))
    prefixes = [own.prefix for own in streams if own.prefix is not None]
    return Stream(slots, _join_prefixes(prefixes) if prefixes else None, mask)


def _mask_of(stream: Stream) -> Array:
    """Gives the mask of the slots of a stream that has some. -> bool [B|1, S]"""
    slots: Array = stream.slots
    return jnp.ones(slots.shape[:2], bool) if stream.slots_mask is None else stream.slots_mask


def _join_prefixes(prefixes: Sequence[Prefix]) -> Prefix:
    k, v = (_beside([getattr(own, name) for own in prefixes], axis=2) for name in ("k", "v"))
    masks = [own.mask for own in prefixes]
    # One array that is traced makes the whole unknown: numpy cannot hold it.
    known = all(isinstance(mask, np.ndarray) for mask in masks)  # when compiling
    # Those of one stream are all inside of a bias or all outside of it.
    inside = prefixes[0].positions is not None
    return Prefix(
        k, v, _beside(masks, axis=2, xp=np if known else jnp),
        jnp.arange(k.shape[2]) if inside else None,
    )  # fmt: skip


def _beside(arrays: Sequence, axis: int = 1, xp=jnp):
    """Concatenates arrays whose axis of examples, the one before `axis`, is 1 or that of others."""
    rows = max(x.shape[axis - 1] for x in arrays)
    wide = [xp.broadcast_to(x, (*x.shape[: axis - 1], rows, *x.shape[axis:])) for x in arrays]
    return xp.concatenate(wide, axis)


def check_prefixes_agree(
    blocks: Sequence[Mapping[str, Any]], dims: Dims, shown: str, *, is_folded: bool
) -> None:
    """Raises InputError for prefixes of one stream that differ in shift or, if folded, in layers.

    `blocks` are those of the methods, and `shown` names them in the message. An export has a single
    interval of layers for all folded prefixes.
    """
    for stream, (lengths, shifts, layers) in _FIELDS.items():
        there = [block for block in blocks if any(map(block.get, lengths))]
        found = [next((block[x] for x in shifts if x in block), None) for block in there]
        shift = [bool(x) for x in found if x is not None]
        _check_one(shown, "shift", shift, shift)
        if is_folded:
            total = dims.layers if stream == "encoder" else dims.decoder_layers
            held = [block[layers] for block in there if layers in block]
            _check_one(shown, layers, held, [parse_layers(text, total, layers) for text in held])


def _check_one(shown: str, field: str, held: Sequence[Any], meant: Sequence[Any]) -> None:
    if len(set(meant)) > 1:
        told = " and ".join(sorted(set(map(repr, held))))
        raise InputError(f"{shown} has {field}={told}; combined prefixes need the same value")
