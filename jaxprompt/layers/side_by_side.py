"""Combines the injections of several methods into one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxprompt.errors import InputError
from jaxprompt.layers.prefix import parse_layers
from jaxprompt.types import Array, Batch, Dims, Injection, Prefix, Stream

# The fields of a method with the length, the shift of positions (a flag; a number in a folded
# method) and the layers of the prefix of each stream.
_PREFIX_FIELDS = {
    "encoder": (("length",), ("shift",), "layers"),
    "decoder": (("decoder", "decoder_length"), ("shift_decoder", "shift"), "decoder_layers"),
    "cross": (("cross", "cross_length"), (), "cross_layers"),
}

_TEMPLATE_OFFSET = 1 << 30  # above every index of a soft token


class SlotCounts(NamedTuple):
    """The number of soft tokens of one method, and of all methods together."""

    placed: int  # in the template
    decoder: int  # in the decoder's input
    total: int  # of all methods in the template; the other vectors of methods come after them


def join_injections(parts: Sequence[Injection], rows: Sequence[SlotCounts]) -> Injection:
    """Concatenates soft tokens and prefixes; vectors beyond the template's slots come last."""
    encoder = _join_streams([part.encoder for part in parts], [counts.placed for counts in rows])
    decoder = _join_streams([part.decoder for part in parts], [counts.decoder for counts in rows])
    cross = _join_streams([part.cross for part in parts], [0] * len(parts))
    # At most one part has rows for the head.
    (trained_rows, *_) = [*(part.rows for part in parts if part.rows is not None), None]
    return Injection(encoder, decoder, cross, trained_rows)


def renumber_slots(
    view: Callable[[Batch, jnp.ndarray], Batch], rows: SlotCounts, batch: Batch, key: jnp.ndarray
) -> Batch:
    """Applies a method's view of a batch, and renumbers the slots that it writes.

    The slots of the template are numbered over all methods, and keep their numbers wherever the
    view moves them. Slots that the view itself writes count only the method's soft tokens; those
    beyond the template's start after `rows.total`.
    """
    template_slots = batch.encoder.slot
    marked = jnp.where(template_slots >= 0, template_slots + _TEMPLATE_OFFSET, template_slots)
    viewed = view(batch._replace(encoder=batch.encoder._replace(slot=marked)), key)
    slot = viewed.encoder.slot
    own_slots = jnp.where(slot >= 0, slot - rows.placed + rows.total, slot)
    slot = jnp.where(slot >= _TEMPLATE_OFFSET, slot - _TEMPLATE_OFFSET, own_slots)
    return viewed._replace(encoder=viewed.encoder._replace(slot=slot))


def _join_streams(streams: Sequence[Stream], counts: Sequence[int]) -> Stream:
    with_slots = [
        (stream, n) for stream, n in zip(streams, counts, strict=True) if stream.slots is not None
    ]
    slots = mask = None
    if with_slots:
        slots = _join_slots([(stream.slots, n) for stream, n in with_slots])
        if any(stream.slots_mask is not None for stream, _ in with_slots):
            mask = _join_slots([(_slots_mask(stream), n) for stream, n in with_slots])
    prefixes = [stream.prefix for stream in streams if stream.prefix is not None]
    return Stream(slots, _join_prefixes(prefixes) if prefixes else None, mask)


def _join_slots(arrays: Sequence[tuple[Array, int]]) -> Array:
    """Concatenates the first n of each array, the template's slots, and then the others."""
    return _concatenate([x[:, :n] for x, n in arrays] + [x[:, n:] for x, n in arrays])


def _slots_mask(stream: Stream) -> Array:
    """Returns the mask of the slots of a stream that has slots. -> bool [B|1, S]"""
    slots: Array = stream.slots
    return jnp.ones(slots.shape[:2], bool) if stream.slots_mask is None else stream.slots_mask


def _join_prefixes(prefixes: Sequence[Prefix]) -> Prefix:
    k, v = (
        _concatenate([getattr(prefix, name) for prefix in prefixes], axis=2) for name in ("k", "v")
    )
    masks = [prefix.mask for prefix in prefixes]
    # If one mask is traced, the result is: numpy cannot contain it.
    is_static = all(isinstance(mask, np.ndarray) for mask in masks)
    # All prefixes of a stream have positions in a bias, or none has.
    has_positions = prefixes[0].positions is not None
    return Prefix(
        k,
        v,
        _concatenate(masks, axis=2, xp=np if is_static else jnp),
        jnp.arange(k.shape[2]) if has_positions else None,
    )


def _concatenate(arrays: Sequence, axis: int = 1, xp=jnp):
    """Concatenates arrays; the axis of examples, the one before `axis`, is broadcast."""
    batch = max(x.shape[axis - 1] for x in arrays)
    broadcast = [xp.broadcast_to(x, (*x.shape[: axis - 1], batch, *x.shape[axis:])) for x in arrays]
    return xp.concatenate(broadcast, axis)


def check_prefixes_agree(
    blocks: Sequence[Mapping[str, Any]], dims: Dims, shown: str, *, is_folded: bool
) -> None:
    """Raises InputError for prefixes of one stream that differ in shift or, if folded, in layers.

    `blocks` are those of the methods, and `shown` names them in the message. An export has a single
    interval of layers for all folded prefixes.
    """
    for stream, (lengths, shift_fields, layers) in _PREFIX_FIELDS.items():
        with_prefix = [block for block in blocks if any(map(block.get, lengths))]
        shifts = [
            bool(next(block[x] for x in shift_fields if x in block))
            for block in with_prefix
            if any(x in block for x in shift_fields)
        ]
        _check_equal(shown, "shift", shifts, shifts)
        if is_folded:
            num_layers = dims.layers if stream == "encoder" else dims.decoder_layers
            intervals = [block[layers] for block in with_prefix if layers in block]
            parsed = [parse_layers(text, num_layers, layers) for text in intervals]
            _check_equal(shown, layers, intervals, parsed)


def _check_equal(
    shown: str, field: str, shown_values: Sequence[Any], values: Sequence[Any]
) -> None:
    if len(set(values)) > 1:
        values_text = " and ".join(sorted(set(map(repr, shown_values))))
        raise InputError(
            f"{shown} has {field}={values_text}; combined prefixes need the same value"
        )
