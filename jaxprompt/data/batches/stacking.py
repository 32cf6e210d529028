"""Stacks batches, and takes parts of one."""

from collections.abc import Sequence

import numpy as np

from jaxprompt.data.batches.batching import Layout
from jaxprompt.types import NO_LIMIT, Batch, Role, Tokens


def host_share(batch: Batch, layout: Layout) -> Batch:
    """Returns the part of a whole batch that `layout` puts on its host."""

    def host_part(value):
        if value is None:
            return None
        if isinstance(value, Tokens):
            return Tokens(*map(host_part, value))
        size = len(value) // layout.hosts  # some arrays have a row per choice
        return value[layout.host * size : (layout.host + 1) * size]

    return Batch(*map(host_part, batch))


def stack_batches(batches: Sequence[Batch], pad_id: int, side: str) -> Batch:
    """Stacks the batches of R runs, padded to the longest, into arrays [R, ...]."""

    length = max(batch.encoder.ids.shape[1] for batch in batches)
    num_reads = max(batch.label_pos.shape[1] for batch in batches)
    # Read positions move with the text, which padding on the left moves.
    shifts_reads = side == "left" and batches[0].decoder is None
    has_counts = any(batch.counts is not None for batch in batches)
    # Every batch must have the same arrays.
    has_lengths = all(batch.encoder.lengths is not None for batch in batches)
    # Cached states are of every token, or of the read positions.
    by_token = all(map(_has_state_per_token, batches))
    padded_batches = []
    for batch in batches:
        shift = shifts_reads * (length - batch.encoder.ids.shape[1])
        lengths = batch.encoder.lengths if has_lengths else None
        padded = batch._replace(
            encoder=_pad_tokens(batch.encoder._replace(lengths=lengths), length, pad_id, side),
            label_pos=_pad_array(batch.label_pos + shift, num_reads, 0),
        )
        if has_counts and batch.counts is None:  # it has all classes
            padded = padded._replace(counts=np.full(batch.labels.shape, NO_LIMIT, np.int32))
        if batch.cached is not None:
            size, pad_side = (length, side) if by_token else (num_reads, "right")
            padded = padded._replace(cached=_pad_array(batch.cached, size, 0, pad_side))
        if batch.targets is not None:
            padded = padded._replace(targets=_pad_array(batch.targets, num_reads, -1))
        if batch.labels.ndim > 1:  # one per read position
            padded = padded._replace(labels=_pad_array(batch.labels, num_reads, -1))
        if batch.decoder is not None:
            longest = max(b.decoder.ids.shape[1] for b in batches if b.decoder is not None)
            padded = padded._replace(decoder=_pad_tokens(batch.decoder, longest, pad_id, "right"))
        padded_batches.append(padded)

    def stack_arrays(*arrays):
        if arrays[0] is None:
            return None
        if isinstance(arrays[0], Tokens):
            return Tokens(*map(stack_arrays, *arrays))
        return np.stack(arrays)

    return Batch(*map(stack_arrays, *padded_batches))


def _has_state_per_token(batch: Batch) -> bool:
    return batch.cached is not None and batch.cached.shape[1] == batch.encoder.ids.shape[1]


def padding_batch(batch: Batch) -> Batch:
    """Returns a batch of the same shape that is all padding: weight 0 and index -1."""
    return batch._replace(weights=0 * batch.weights, index=np.full_like(batch.index, -1))


def _pad_tokens(tokens: Tokens, length: int, pad_id: int, side: str) -> Tokens:
    pad_values = Tokens(pad_id, False, -1, 0, 0, Role.PAD, 0, None)
    padded = []
    for x, value in zip(tokens, pad_values, strict=True):
        padded.append(x if x is None or value is None else _pad_array(x, length, value, side))
    return Tokens(*padded)


def _pad_array(x: np.ndarray, length: int, pad_value: int, side: str = "right") -> np.ndarray:
    missing = length - x.shape[1]
    widths = [(0, 0), (missing, 0) if side == "left" else (0, missing), *[(0, 0)] * (x.ndim - 2)]
    return np.pad(x, widths, constant_values=pad_value) if missing else x
