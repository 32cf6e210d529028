"""Padded numpy batches of few shapes: a shuffled stream for training, one sorted pass otherwise."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from jaxprompt.data.batches.packing import pack_rows, plan_rows
from jaxprompt.data.batches.stream import ENDLESS, BatchStream
from jaxprompt.data.text.encoded import Encoded, Ints, Row
from jaxprompt.errors import InputError
from jaxprompt.types import Batch, Role, SharedPrefix, Tokens

EncodedExamples = Sequence[Sequence[Encoded]]  # examples, K rows each

_SHORTEST = 32  # tokens; shorter ones would add programs for steps that are small anyway
_ORDER = 2  # version of the order with groups; in the first, each seed shuffled their batches
_GROUPS = 4  # at least so many in an epoch, or its batches would be those of every epoch


@dataclass(frozen=True)
class Layout:
    """How examples are laid out in arrays, and which part of a global batch this host has."""

    batch: int  # examples of a batch over all hosts
    max_len: int
    pad_id: int
    num_rows: int = 1  # K; an example with fewer choices gets rows of padding
    side: str = "right"  # side of the padding
    shift: int = 0  # added to every position, for prompts that take the first ones
    decoder_shift: int = 0  # added to every position of the decoder
    multiple: int = 8  # of the lengths of batches; 0 = few lengths
    ends: tuple[int, ...] = ()  # tokens that end a generated text
    branches: bool = False  # whether rows have branches, see data/text/target.py
    packed: bool = False  # whether a row has several examples, whose labels are their targets
    shared_prefix: SharedPrefix | None = None  # tokens removed from every row; the model adds them
    host: int = 0
    hosts: int = 1

    def __post_init__(self):
        """Raises InputError for a batch size that hosts cannot share."""
        if self.batch % self.hosts:
            raise InputError(
                f"batch size {self.batch} is not a multiple of {self.hosts} hosts; use a multiple"
            )

    def with_ends(self, ids: tuple[int, ...]) -> "Layout":
        """Returns a layout whose generated texts also end at these tokens."""
        return replace(self, ends=tuple(dict.fromkeys([*self.ends, *ids])))

    def single_host(self) -> "Layout":
        """Returns the layout with all rows of every batch on this host."""
        return replace(self, host=0, hosts=1)

    def length(self, longest: int) -> int:
        """Returns the smallest length of a batch that fits `longest` tokens.

        It may slightly exceed max_len, because matrix units prefer multiples, and XLA's compiler
        for GPUs refuses some products of odd lengths. With `multiple` 0 there are 3 lengths per
        doubling, 32, 40, 48, 64, 80, ..., up to max_len.
        """
        if self.multiple:
            return _round_up(max(longest, 1), self.multiple)
        length = max(int(longest), _SHORTEST)
        below = 1 << (length - 1).bit_length() - 1  # the largest power of two below it
        length = next(x for x in (below * 5 // 4, below * 3 // 2, below * 2) if x >= length)
        # The attention kernels of TPUs, for 512 tokens or more, need multiples of 128.
        limit = _round_up(max(longest, self.max_len), 8 if self.max_len <= 512 else 128)
        return min(length, limit)


def collate(
    rows: EncodedExamples,
    labels: Ints,
    index: Ints,
    *,
    batch: int,
    length: int,
    pad_id: int,
    label_width: int,
    num_rows: int = 1,
    side: str = "right",
    shift: int = 0,
    branches: bool = False,
    decoder_length: int = 0,
    decoder_shift: int = 0,
    like: Encoded | None = None,
) -> Batch:
    """Pads up to `batch` examples to arrays [batch * num_rows, length]; label_pos has one row each.

    Decoder rows are padded on the right. Padding examples and rows have mask False throughout,
    weight 0 and index -1. `like` is any row, for a batch of padding only.
    """
    count, total = len(rows), batch * num_rows
    flat = {
        e * num_rows + k: row for e, example in enumerate(rows) for k, row in enumerate(example)
    }
    first_row = rows[0][0] if like is None else like
    label_pos = np.zeros((total, label_width), np.int32)
    targets = None if first_row.targets is None else np.full((total, label_width), -1, np.int32)
    decoder = None
    if first_row.decoder is not None:
        decoder_rows = {r: row.decoder for r, row in flat.items() if row.decoder is not None}
        has_segments = first_row.decoder.segments is not None
        decoder = _pad(
            decoder_rows, total, decoder_length, pad_id, "right", decoder_shift, has_segments
        )
    for r, row in flat.items():
        # With a decoder, label_pos are its positions, and its rows are padded on the right.
        offset = length - len(row.ids) if side == "left" and decoder is None else 0
        label_pos[r, : len(row.label_pos)] = row.label_pos + offset
        if targets is not None and row.targets is not None:
            targets[r, : len(row.targets)] = row.targets
    padding = (0, batch - count)
    label_array = _as_labels(labels)
    choices = np.asarray([example[0].num_choices for example in rows], np.int32)
    encoder = _pad(flat, total, length, pad_id, side, shift, first_row.segments is not None)
    if side == "right" and not branches:
        encoder = encoder._replace(lengths=encoder.mask.sum(1, dtype=np.int32))
    return Batch(
        encoder=encoder,
        label_pos=label_pos,
        labels=np.pad(
            label_array, [padding] + [(0, 0)] * (label_array.ndim - 1), constant_values=-1
        ),
        weights=np.pad(np.ones(count, np.float32), padding),
        index=np.pad(np.asarray(index, np.int32), padding, constant_values=-1),
        decoder=decoder,
        targets=targets,
        counts=np.pad(choices, padding) if first_row.num_choices else None,
    )


def _pad(
    rows: Mapping[int, Row | Encoded],
    total: int,
    length: int,
    pad_id: int,
    side: str,
    shift: int,
    has_segments: bool,
) -> Tokens:
    """Pads rows, by index, to the arrays of one stream, [total, length]."""
    ids = np.full((total, length), pad_id, np.int32)
    mask = np.zeros((total, length), bool)
    slot = np.full((total, length), -1, np.int32)
    positions, types = (np.zeros((total, length), np.int32) for _ in range(2))
    roles = np.full((total, length), Role.PAD, np.int8)
    segments = np.zeros((total, length), np.int32) if has_segments else None
    for r, row in rows.items():
        start = length - len(row.ids) if side == "left" else 0
        span = slice(start, start + len(row.ids))
        ids[r, span], mask[r, span], slot[r, span] = row.ids, True, row.slot
        types[r, span], roles[r, span] = row.types, row.roles
        positions[r, span] = row.positions + shift
        if segments is not None and row.segments is not None:
            segments[r, span] = row.segments
    return Tokens(ids, mask, slot, positions, types, roles, segments)


class _Examples:
    """Encoded examples and their layout; builds the batch of any list of them."""

    def __init__(self, rows: EncodedExamples, labels: Ints, layout: Layout):
        if not rows:
            raise InputError("the split has 0 examples; a split needs at least 1")
        max_rows = max(map(len, rows))
        if max_rows > layout.num_rows:
            raise InputError(
                f"an example has {max_rows} rows, over num_rows {layout.num_rows}, the number of "
                "choices this run was made for; use fewer choices"
            )
        if layout.shared_prefix is not None:
            prefix = {name: np.array(x) for name, x in layout.shared_prefix._asdict().items()}
            rows = [[_strip_prefix(prefix, row) for row in example] for example in rows]
        if layout.packed:
            rows = pack_rows(rows, _packed_room(layout))
            labels = np.full(len(rows), -1, np.int32)
        self.rows = rows  # of packed examples, those of batches
        self.labels = _as_labels(labels)  # [examples] or [examples, M]
        self.layout = layout
        all_rows = [row for example in rows for row in example]
        self.label_width = max(len(row.label_pos) for row in all_rows)  # M
        # The same for all batches, so that only the encoder's lengths need several compilations.
        self.decoder_length = max(len(row.decoder.ids) if row.decoder else 0 for row in all_rows)
        self.lengths = np.array([max(len(row.ids) for row in example) for example in rows])

    def batch(self, indices: np.ndarray) -> Batch:
        """Builds this host's part of the batch of the examples `indices` by all hosts."""
        layout = self.layout
        host_batch = layout.batch // layout.hosts
        host_indices = indices[layout.host * host_batch : (layout.host + 1) * host_batch]
        return collate(
            [self.rows[i] for i in host_indices],
            self.labels[host_indices],
            host_indices,
            batch=host_batch,
            # The longest of all hosts' examples: every process must run the same program.
            length=layout.length(self.lengths[indices].max()),
            pad_id=layout.pad_id,
            label_width=self.label_width,
            num_rows=layout.num_rows,
            side=layout.side,
            shift=layout.shift,
            branches=layout.branches,
            decoder_length=self.decoder_length,
            decoder_shift=layout.decoder_shift,
            like=self.rows[0][0],  # in a last short batch this host may have no example
        )


class TrainBatches(BatchStream):
    """Shuffled batches over epochs, endless or bounded, prefetched by grain's threads.

    Every epoch contains every example once; its last short batch is padded with weight 0. With
    `group` > 1 the examples of that many batches, but at most of a quarter of an epoch, are sorted
    by length before they are divided into batches, and the batches are shuffled. The order depends
    only on (seed, epoch).
    """

    def __init__(
        self,
        rows: EncodedExamples,
        labels: Ints,
        layout: Layout,
        *,
        seed: int,
        epochs: int | None = None,
        group: int = 1,
        prefetch: int = 4,
    ):
        """Starts at step 0; `prefetch` batches are made ahead, 0 = in the caller's thread."""
        self._examples = _Examples(rows, labels, layout)
        self._seed = seed
        rows = self._examples.rows
        self.steps_per_epoch = -(-len(rows) // layout.batch)
        self._group = min(group, max(self.steps_per_epoch // _GROUPS, 1))
        # Two, because prefetched batches may belong to the next epoch.
        self._epoch = lru_cache(maxsize=2)(self._plan_epoch)
        self._shapes: set[tuple[int, int]] = set()
        total = ENDLESS if epochs is None else epochs * self.steps_per_epoch
        # The order of batches depends on these; a run that resumes must have the same.
        settings = {"examples": len(rows), "batch": layout.batch, "seed": seed}
        settings["group"] = self._group
        if self._group > 1:
            settings["order"] = _ORDER
        super().__init__(self._at, total, prefetch, settings, "data")

    @property
    def shapes(self) -> frozenset[tuple[int, int]]:
        """Shapes [rows, T] returned so far; each is one compilation."""
        return frozenset(self._shapes)

    def __next__(self) -> Batch:
        """Returns the next batch."""
        batch = super().__next__()
        self._shapes.add(batch.encoder.ids.shape)
        return batch

    def _at(self, step: int) -> Batch:
        epoch, i = divmod(step, self.steps_per_epoch)
        return self._examples.batch(self._epoch(epoch)[i])

    def _plan_epoch(self, epoch: int) -> list[np.ndarray]:
        """Returns the examples of each batch of an epoch."""
        size = self._examples.layout.batch
        order = _shuffled(len(self._examples.rows), self._seed, epoch)
        if self._group == 1:
            return _chunks(order, size)
        plan = []
        for group in _chunks(order, size * self._group):
            # Stable: equal lengths keep the shuffled order, on every machine.
            by_length = np.argsort(self._examples.lengths[group], kind="stable")
            plan += _chunks(group[by_length], size)
        # Otherwise every group would be trained from short to long. Every seed has the same order
        # of short and long batches, so that runs of a grid, side by side, need little padding.
        return [plan[i] for i in _shuffled(len(plan), epoch)]


class EvalBatches:
    """One pass over every example, longest first, so that memory runs out at once or never."""

    def __init__(self, rows: EncodedExamples, labels: Ints, layout: Layout):
        """Plans the pass; iterating builds the batches, any number of times."""
        self._examples = _Examples(rows, labels, layout)
        # Stable, so that batches, and with them sums of floats, are the same in every pass.
        order = np.argsort(-self._examples.lengths, kind="stable")
        self._plan = _chunks(order, layout.batch)

    def __len__(self) -> int:
        """Returns the number of batches."""
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches; `Batch.index` is the example of each row."""
        return map(self._examples.batch, self._plan)

    @property
    def shapes(self) -> frozenset[tuple[int, int]]:
        """Shapes [rows, T] of one pass."""
        return frozenset(self._shapes())

    def one_of_each_shape(self, skip: Collection[tuple[int, int]] = ()) -> Iterator[Batch]:
        """Yields the first batch of each shape [rows, T] that is not in `skip`."""
        done = set(skip)
        for shape, indices in zip(self._shapes(), self._plan, strict=True):
            if shape not in done:
                done.add(shape)
                yield self._examples.batch(indices)

    def _shapes(self) -> list[tuple[int, int]]:
        """Lists the shape of each batch."""
        layout = self._examples.layout
        rows = layout.batch // layout.hosts * layout.num_rows
        longest = (self._examples.lengths[indices].max() for indices in self._plan)
        return [(rows, layout.length(length)) for length in longest]


def count_units(rows: EncodedExamples, layout: Layout) -> int:
    """Returns the number of entries of the batches of an epoch: examples, or packed rows."""
    if not layout.packed:
        return len(rows)
    prefix = 0 if layout.shared_prefix is None else len(layout.shared_prefix.ids)
    return len(plan_rows([len(row.ids) - prefix for row, *_ in rows], _packed_room(layout)))


def _packed_room(layout: Layout) -> int:
    """Returns the maximum length of a packed row; a shared prefix is not part of it."""
    prefix = layout.shared_prefix
    return layout.max_len - (0 if prefix is None else len(prefix.ids))


def one_batch(rows: EncodedExamples, labels: Ints, layout: Layout) -> Batch:
    """Returns one batch of a few examples, in the given order."""
    # On one host: it is used for shapes, and for values that do not depend on the batch.
    layout = replace(layout.single_host(), batch=len(rows))
    return _Examples(rows, labels, layout).batch(np.arange(len(rows)))


def _as_labels(labels: Ints) -> np.ndarray:
    """Converts labels to an array: int32 for classes, float32 for numbers."""
    array = np.asarray(labels)
    # numpy reads an empty list as floats; an empty array has the type of its split.
    floats = array.dtype.kind == "f" and (array.size > 0 or array is labels)
    return array.astype(np.float32 if floats else np.int32)


def _strip_prefix(prefix: Mapping[str, np.ndarray], row: Encoded) -> Encoded:
    """Removes the shared prefix of a row; its positions stay as they are."""
    count = len(prefix["ids"])
    if not all(np.array_equal(getattr(row, name)[:count], x) for name, x in prefix.items()):
        raise ValueError("a row does not begin with the shared prefix of its layout")
    fields = {name: getattr(row, name)[count:] for name in (*prefix, "positions")}
    segments = row.segments if row.segments is None else row.segments[count:]
    return row._replace(**fields, label_pos=row.label_pos - count, segments=segments)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _shuffled(count: int, *seed: int) -> np.ndarray:
    """Returns the numbers below `count` in an order that depends only on `seed`."""
    # RandomState's streams are frozen by numpy's policy, Generator's are not.
    bits = np.random.MT19937(np.random.SeedSequence(seed))
    return np.random.RandomState(bits).permutation(count)


def _chunks(order: np.ndarray, size: int) -> list[np.ndarray]:
    return [order[i : i + size] for i in range(0, len(order), size)]
