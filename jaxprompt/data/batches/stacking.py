"""Stacks batches, and takes parts of one."""

from collections.abc import Sequence

import numpy as np

from jaxprompt.data.batches.batching import Layout
from jaxprompt.types import NO_LIMIT, Batch, Role, Tokens


def share_of(batch: Batch, layout: Layout) -> Batch:
    """Returns the part of a whole batch that `layout` puts on its host."""

    def cut(part):
        if part is None:
            return None
        if isinstance(part, Tokens):
            return Tokens(*map(cut, part))
        own = len(part) // layout.hosts  # of arrays with a row for every choice as well
        return part[layout.host * own : (layout.host + 1) * own]

    return Batch(*map(cut, batch))


def stack(batches: Sequence[Batch], pad_id: int, side: str) -> Batch:
    """Stacks the batches of R runs, padded to the longest, into arrays [R, ...]."""
    first = batches[0]
    length = max(batch.encoder.ids.shape[1] for batch in batches)
    reads = max(batch.label_pos.shape[1] for batch in batches)
    moves = side == "left" and first.decoder is None  # what is read moves with the text
    counted = any(batch.counts is not None for batch in batches)
    # Runs are stacked array by array, so what one of them lacks is left out of all.
    told = all(batch.encoder.lengths is not None for batch in batches)
    # States are of every token, or of the positions that are read.
    by_token = all(map(_has_state_per_token, batches))
    wide = []
    for batch in batches:
        by = moves * (length - batch.encoder.ids.shape[1])
        lengths = batch.encoder.lengths if told else None
        part = batch._replace(
            encoder=_widen_tokens(batch.encoder._replace(lengths=lengths), length, pad_id, side),
            label_pos=_widen(batch.label_pos + by, reads, 0),
        )
        if counted and batch.counts is None:  # every class is there
            part = part._replace(counts=np.full(batch.labels.shape, NO_LIMIT, np.int32))
        if batch.cached is not None:
            size, at = (length, side) if by_token else (reads, "right")
            part = part._replace(cached=_widen(batch.cached, size, 0, at))
        if batch.targets is not None:
            part = part._replace(targets=_widen(batch.targets, reads, -1))
        if batch.labels.ndim > 1:  # one a read position
            part = part._replace(labels=_widen(batch.labels, reads, -1))
        if batch.decoder is not None:
            inner = max(b.decoder.ids.shape[1] for b in batches if b.decoder is not None)
            part = part._replace(decoder=_widen_tokens(batch.decoder, inner, pad_id, "right"))
        wide.append(part)

    def join(*parts):
        if parts[0] is None:
            return None
        return Tokens(*map(join, *parts)) if isinstance(parts[0], Tokens) else np.stack(parts)

    return Batch(*map(join, *wide))


def _has_state_per_token(batch: Batch) -> bool:
    return batch.cached is not None and batch.cached.shape[1] == batch.encoder.ids.shape[1]


def empty(batch: Batch) -> Batch:
    """Returns a batch of the same shape that is all padding: weight 0 and index -1."""
    return batch._replace(weights=0 * batch.weights, index=np.full_like(batch.index, -1))


def _widen_tokens(tokens: Tokens, length: int, pad_id: int, side: str) -> Tokens:
    fills = Tokens(pad_id, False, -1, 0, 0, Role.PAD, 0, None)
    pairs = zip(tokens, fills, strict=True)
    keeps = lambda x, fill: x is None or fill is None
    return Tokens(*(x if keeps(x, fill) else _widen(x, length, fill, side) for x, fill in pairs))


def _widen(x: np.ndarray, length: int, fill: int, side: str = "right") -> np.ndarray:
    by = length - x.shape[1]
    widths = [(0, 0), (by, 0) if side == "left" else (0, by), *[(0, 0)] * (x.ndim - 2)]
    return np.pad(x, widths, constant_values=fill) if by else x
