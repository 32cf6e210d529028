"""Batches: padding, positions, order, exact restarts and the shares of hosts."""

import json

import numpy as np
import pytest

from jaxprompt.data.batches.batching import EvalBatches, Layout, TrainBatches, collate
from jaxprompt.data.batches.stacking import host_share, stack_batches
from jaxprompt.data.text.encoded import Encoded, Row
from jaxprompt.errors import InputError
from jaxprompt.types import NO_LIMIT, Role


def encoded(length, first=100, slots=2, label_pos=None):
    """A row of `slots` soft tokens and then text."""
    slot = np.full(length, -1, np.int32)
    slot[:slots] = np.arange(slots)
    roles = np.where(slot >= 0, Role.SOFT, Role.TEXT).astype(np.int8)
    ids = np.where(slot >= 0, 0, first + np.arange(length)).astype(np.int32)
    at = [slots] if label_pos is None else label_pos
    ones, positions = np.ones(length, np.int32), np.arange(length, dtype=np.int32)
    return Encoded(ids, slot, ones, roles, positions, np.array(at, np.int32))


def split(count=37, seed=0):
    """Examples of varied lengths whose first text token tells which one it is."""
    lengths = np.random.RandomState(seed).randint(4, 30, count)
    return [[encoded(n, first=1000 * (i + 1))] for i, n in enumerate(lengths)], np.arange(count) % 3


def layout(**changes):
    return Layout(**{"batch": 8, "max_len": 32, "pad_id": 9} | changes)


def arrays(batch):
    return [x for x in (*batch.encoder, *batch[1:5]) if x is not None]


def same(a, b):
    for left, right in zip(arrays(a), arrays(b), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shift", [0, 5])
def test_padded_row_equals_unpadded_row(side, shift):
    rows = [[encoded(5)], [encoded(3, first=200)]]
    batch = collate(
        rows,
        [1, 2],
        [10, 11],
        batch=3,
        length=8,
        pad_id=9,
        label_width=1,
        side=side,
        shift=shift,
    )
    tokens = batch.encoder
    for e, (row,) in enumerate(rows):
        real = tokens.mask[e]
        assert real.sum() == len(row.ids)
        assert real[0] == (side == "right") and real[-1] == (side == "left")
        np.testing.assert_array_equal(tokens.ids[e][real], row.ids)
        np.testing.assert_array_equal(tokens.slot[e][real], row.slot)
        np.testing.assert_array_equal(tokens.types[e][real], row.types)
        np.testing.assert_array_equal(tokens.roles[e][real], row.roles)
        np.testing.assert_array_equal(tokens.positions[e][real], shift + np.arange(len(row.ids)))
        assert tokens.ids[e, batch.label_pos[e, 0]] == row.ids[row.label_pos[0]]
    pads = ~tokens.mask
    assert (tokens.ids[pads] == 9).all() and (tokens.slot[pads] == -1).all()
    assert not tokens.positions[pads].any() and not tokens.roles[pads].any()
    assert not tokens.mask[2].any()
    assert batch.labels.tolist() == [1, 2, -1]
    assert batch.weights.tolist() == [1, 1, 0]
    assert batch.index.tolist() == [10, 11, -1]
    kinds = [array.dtype.name for array in arrays(batch)]
    length_leaves = ["int32"] * (side == "right")  # lengths
    assert kinds == ["int32", "bool", "int32", "int32", "int32", "int8", *length_leaves] + [
        "int32",
        "int32",
        "float32",
        "int32",
    ]
    lengths = [len(row.ids) for (row,) in rows] + [0]
    assert tokens.lengths is None if side == "left" else tokens.lengths.tolist() == lengths


@pytest.mark.parametrize("targets, shift", [({}, 0), ({"decoder_shift": 3}, 3)])
def test_what_a_decoder_is_fed_is_counted_from_its_own_shift(targets, shift):
    """Padded on the right, whatever the side of the input and its shift."""
    rows = [[encoded(5, slots=0)._replace(decoder=Row(*encoded(n, slots=0)[:5]))] for n in (2, 4)]
    batch = collate(
        rows, [0, 1], [0, 1], batch=2, length=6, pad_id=9, label_width=1, side="left", shift=7,
        decoder_length=4, **targets,
    )  # fmt: skip
    places = np.arange(4) + shift
    assert batch.decoder.positions.tolist() == [[*places[:2], 0, 0], places.tolist()]
    assert batch.decoder.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert batch.encoder.positions.tolist() == [[0, *range(7, 12)]] * 2
    assert batch.label_pos.tolist() == [row.label_pos.tolist() for (row,) in rows]


def test_choices_are_counted():
    """An example's, 0 for filling; not where each row is a choice, or all have all classes."""
    of = lambda count: [encoded(4)._replace(num_choices=count)]
    pad = dict(length=8, pad_id=9, label_width=1)
    batch = collate([of(3), of(2)], [0, 0], [0, 1], batch=3, **pad)
    assert batch.counts.tolist() == [3, 2, 0] and batch.counts.dtype == np.int32
    filling = collate([], [], [], batch=3, like=of(3)[0], **pad)
    assert filling.counts.tolist() == [0, 0, 0]
    assert stack_batches([batch, filling], 9, "right").counts.tolist() == [[3, 2, 0], [0, 0, 0]]
    plain = collate([of(0), of(0)], [0, 0], [0, 1], batch=3, **pad)
    assert plain.counts is None and stack_batches([plain, plain], 9, "right").counts is None
    mixed = stack_batches([plain, batch], 9, "right").counts
    assert mixed.min(axis=1).tolist() == [NO_LIMIT, 0] and mixed[1].tolist() == [3, 2, 0]


def packed(*lengths, with_decoder=False):
    """A row of documents, in a decoder too where `with_decoder`."""
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths).astype(np.int32)
    row = encoded(len(segments), slots=0)._replace(segments=segments)
    return row._replace(decoder=Row(*row[:5], segments)) if with_decoder else row


@pytest.mark.parametrize("side", ["left", "right"])
def test_documents_of_a_row_keep_their_numbers(side):
    rows = [[packed(3, 2)], [packed(1, 1, 2)]]
    pad = dict(pad_id=9, label_width=1, side=side)
    batch = collate(rows, [0, 0], [0, 1], batch=3, length=7, **pad)
    tokens = batch.encoder
    assert tokens.segments.dtype == np.int32
    for actual, mask, expected in zip(
        tokens.segments, tokens.mask, [[1, 1, 1, 2, 2], [1, 2, 3, 3], []], strict=True
    ):
        assert actual[mask].tolist() == expected and not actual[~mask].any()
    filling = collate([], [], [], batch=3, length=7, like=rows[0][0], **pad)
    assert filling.encoder.segments.shape == (3, 7) and not filling.encoder.segments.any()

    longer = collate([[packed(9)]], [0], [0], batch=3, length=9, **pad)
    together = stack_batches([batch, longer], 9, side)
    again = collate(rows, [0, 0], [0, 1], batch=3, length=9, **pad)
    for x, *parts in zip(*(b.encoder for b in (together, again, longer)), strict=True):
        np.testing.assert_array_equal(x, np.stack(parts))


def test_documents_of_a_decoder():
    pad = dict(batch=2, length=6, decoder_length=8, pad_id=9, label_width=1)
    batch = collate([[packed(4, 2, with_decoder=True)]], [0], [0], **pad)
    assert batch.decoder.segments.tolist() == [[1, 1, 1, 1, 2, 2, 0, 0], [0] * 8]
    assert batch.encoder.segments.tolist() == [[1, 1, 1, 1, 2, 2], [0] * 6]
    plain = packed(6, with_decoder=True)._replace(segments=None)
    plain = plain._replace(decoder=plain.decoder._replace(segments=None))
    batch = collate([[plain]], [0], [0], **pad)
    assert batch.encoder.segments is batch.decoder.segments is None
    assert stack_batches([batch, batch], 9, "right").encoder.segments is None


def test_choices_are_example_major():
    rows = [[encoded(4, 100), encoded(5, 200)], [encoded(3, 300)]]
    batch = collate(rows, [0, 0], [0, 1], batch=2, length=6, pad_id=9, label_width=1, num_rows=2)
    assert batch.encoder.ids.shape == (4, 6)
    assert batch.label_pos.tolist() == [[2], [2], [2], [0]]
    assert batch.encoder.ids[:, 2].tolist() == [102, 202, 302, 9]
    assert batch.encoder.mask.any(1).tolist() == [True, True, True, False]


def test_lengths_are_multiples():
    assert [layout(max_len=30).length(n) for n in (1, 8, 9, 25, 30)] == [8, 8, 16, 32, 32]
    # A DeBERTa reads texts of any length: its lengths cannot be listed.
    assert layout(max_len=2**40).length(9) == 16


@pytest.mark.parametrize("max_len", [20, 32, 100, 128, 384, 510, 512, 612, 2048, 2**40])
def test_few_lengths(max_len):
    few = layout(max_len=max_len, multiple=0)
    last = min(max_len, 4096)
    lengths = [few.length(n) for n in range(1, last + 1)]
    assert all(n <= length for n, length in enumerate(lengths, 1))
    # At most a third is padding, but for short texts and the last one of more than 512 tokens.
    assert all(length <= max(4 * n / 3, 40) for n, length in enumerate(lengths, 1))
    assert not any(x % 8 for x in lengths) and not any(x % 128 for x in lengths if x > 512)
    assert len(set(lengths)) <= 3 * np.ceil(max(np.log2(last / 32), 0)) + 1
    assert lengths[-1] < max_len + (8 if max_len <= 512 else 128)


def test_few_lengths_are_those_of_the_documentation():
    few = layout(max_len=512, multiple=0)
    lengths = {few.length(n) for n in range(1, 513)}
    assert lengths == {32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512}
    assert {layout(max_len=100, multiple=0).length(n) for n in (90, 100)} == {96, 104}
    batches = list(TrainBatches(*split(20), few, seed=0, epochs=1))
    assert {batch.encoder.ids.shape[1] for batch in batches} == {32}


@pytest.mark.parametrize("group", [1, 3])
def test_epoch_holds_every_example_once(group):
    rows, labels = split(101)
    stream = TrainBatches(rows, labels, layout(), seed=3, epochs=3, group=group)
    batches = list(stream)
    assert stream.steps_per_epoch == 13 and len(batches) == 39
    orders = []
    for epoch in range(3):
        part = batches[epoch * 13 : (epoch + 1) * 13]
        index = np.concatenate([b.index for b in part])
        weights = np.concatenate([b.weights for b in part])
        orders.append(index[index >= 0].tolist())
        assert sorted(orders[-1]) == list(range(101))
        np.testing.assert_array_equal(weights, index >= 0)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    for batch in batches:
        is_real = batch.index >= 0
        np.testing.assert_array_equal(batch.labels[is_real], labels[batch.index[is_real]])
        assert (batch.encoder.ids[is_real, 2] == 1000 * (batch.index[is_real] + 1) + 2).all()
        longest = batch.encoder.mask.sum(1).max()
        assert batch.encoder.ids.shape == (8, -(-longest // 8) * 8)
    assert stream.shapes == {b.encoder.ids.shape for b in batches}


def test_order_is_the_frozen_stream_of_seed_and_epoch():
    rows, labels = split(10)
    stream = TrainBatches(rows, labels, layout(batch=10), seed=7)
    for epoch in range(2):
        bits = np.random.MT19937(np.random.SeedSequence((7, epoch)))
        expected = np.random.RandomState(bits).permutation(10)
        assert next(stream).index.tolist() == expected.tolist()
    stream = TrainBatches(rows, labels, layout(batch=10), seed=7)
    assert next(stream).index.tolist() == [4, 5, 9, 8, 1, 7, 6, 0, 2, 3]


@pytest.mark.parametrize("steps, groups", [(3, 1), (4, 1), (7, 1), (8, 2), (31, 7), (32, 8)])
def test_a_small_epoch_has_four_groups(steps, groups):
    """Else all batches of an epoch would be those of the last one, sorted by length."""
    rows, labels = split(8 * steps)
    stream = TrainBatches(rows, labels, layout(), seed=0, group=8)
    assert stream.get_state()["group"] == groups
    sets = [{frozenset(next(stream).index.tolist()) for _ in range(steps)} for _ in range(2)]
    assert len(sets[0] & sets[1]) < steps / 2


def test_batches_of_all_seeds_are_long_at_the_same_steps():
    rows, labels = split(200)
    runs = [TrainBatches(rows, labels, layout(), seed=n, epochs=2, group=6) for n in range(3)]
    batches = list(zip(*runs, strict=True))
    lengths = np.array([[b.encoder.ids.shape[1] for b in step] for step in batches])
    assert lengths.max(1).mean() < 1.2 * lengths.mean()
    assert len({b.index.tobytes() for step in batches for b in step}) == lengths.size


def test_grouping_saves_padding():
    rows, labels = split(200)

    def pads(group):
        stream = TrainBatches(rows, labels, layout(), seed=0, epochs=1, group=group)
        return sum(int((~b.encoder.mask).sum()) for b in stream)

    assert pads(6) < 0.5 * pads(1)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("prefetch", [0, 1, 7])
def test_restored_stream_goes_on_exactly(group, prefetch):
    rows, labels = split(101)

    def stream(**changes):
        settings = {"seed": 3, "group": group, "prefetch": prefetch} | changes
        return TrainBatches(rows, labels, layout(), **settings)

    whole = stream(prefetch=4)
    expected = [next(whole) for _ in range(25)]
    for k in (0, 1, 13, 20):
        first = stream()
        for i in range(k):
            same(next(first), expected[i])
        state = json.loads(json.dumps(first.get_state()))
        second = stream()
        next(second)  # a stream that has started is set back as well
        second.set_state(state)
        assert second.get_state() == state
        for i in range(k, k + 5):
            same(next(second), expected[i])
        first.close()
        second.close()


def test_state_of_another_stream_is_refused():
    rows, labels = split()
    state = TrainBatches(rows, labels, layout(), seed=3).get_state()
    with pytest.raises(InputError, match="has seed 3, but this run has 4"):
        TrainBatches(rows, labels, layout(), seed=4).set_state(state)
    with pytest.raises(InputError, match="has batch 8, but this run has 4"):
        TrainBatches(rows, labels, layout(batch=4), seed=3).set_state(state)
    rows, labels = split(101)
    stream = TrainBatches(rows, labels, layout(), seed=3, group=3)
    state = {name: value for name, value in stream.get_state().items() if name != "order"}
    with pytest.raises(InputError, match="has order None, but this run has 2"):
        stream.set_state(state)


def test_bounded_stream_ends_after_restore():
    rows, labels = split()
    stream = TrainBatches(rows, labels, layout(), seed=3, epochs=2)
    for _ in range(8):
        next(stream)
    again = TrainBatches(rows, labels, layout(), seed=3, epochs=2)
    again.set_state(stream.get_state())
    assert len(list(again)) == 2


@pytest.mark.parametrize("make", [TrainBatches, EvalBatches])
def test_hosts_share_a_global_batch(make):
    rows, labels = split(69)
    settings = {"seed": 1, "epochs": 1, "group": 2} if make is TrainBatches else {}
    whole = list(make(rows, labels, layout(), **settings))
    parts = [list(make(rows, labels, layout(host=h, hosts=2), **settings)) for h in (0, 1)]
    for batch, *shares in zip(whole, *parts, strict=True):
        assert all(len(share.index) == 4 for share in shares)
        for all_rows, *halves in zip(*map(arrays, (batch, *shares)), strict=True):
            np.testing.assert_array_equal(all_rows, np.concatenate(halves))


@pytest.mark.parametrize("make", [TrainBatches, EvalBatches])
def test_labels_that_are_numbers_are_so_on_a_host_that_has_none(make):
    """Else its program would be another than that of its peers."""
    rows, _ = split(9)
    settings = {"seed": 1, "epochs": 1} if make is TrainBatches else {}
    for host in (0, 1):
        for batch in make(rows, np.linspace(0, 5, 9), layout(host=host, hosts=2), **settings):
            assert batch.labels.dtype == np.float32
    assert batch.index.tolist() == [-1] * 4


@pytest.mark.parametrize("choices", [1, 2])
def test_the_share_of_a_whole_batch_is_what_a_host_lays(choices):
    """The last batch is short: the second host has filling alone."""
    rows, labels = split(11)
    rows = [[row] + [encoded(6, first=7)] * (choices - 1) for (row,) in rows]
    for host in (0, 1):
        share = layout(num_rows=choices, host=host, hosts=2)
        whole = EvalBatches(rows, labels, share.single_host())
        for batch, expected in zip(whole, EvalBatches(rows, labels, share), strict=True):
            assert len(batch.index) == 2 * len(expected.index)
            same(host_share(batch, share), expected)
            assert host_share(batch, share).index.tolist() == expected.index.tolist()
    assert expected.index.tolist() == [-1] * 4


def states_of(side, lengths, reads, sizes):
    """Stacks two runs with states of so many columns. -> the first number of each [2, 1, ...]"""
    batches = []
    for number, (length, read, size) in enumerate(zip(lengths, reads, sizes, strict=True), 1):
        laid = dict(batch=1, length=length, pad_id=9, label_width=read, side=side)
        batch = collate([[encoded(1, slots=0, label_pos=[0] * read)]], [0], [0], **laid)
        batches.append(batch._replace(cached=np.full((1, size, 3), float(number))))
    actual = stack_batches(batches, 9, side)
    assert (
        actual.cached.shape == (2, 1, max(sizes), 3)
        and (actual.cached == actual.cached[..., :1]).all()
    )
    return actual.cached[..., 0].tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_states_are_widened_as_the_tokens(side):
    short = [0, 1] if side == "left" else [1, 0]
    assert states_of(side, (8, 16), (1, 1), (8, 16)) == [
        [[x for x in short for _ in range(8)]], [[2] * 16]
    ]  # fmt: skip
    assert states_of(side, (8, 16), (2, 1), (8, 16))[1] == [[2] * 16]


@pytest.mark.parametrize("side", ["left", "right"])
def test_states_of_what_is_read_are_widened_as_that(side):
    """Their tokens are one column."""
    assert states_of(side, (1, 1), (1, 3), (1, 3)) == [[[1, 0, 0]], [[2, 2, 2]]]
    assert states_of(side, (1, 1), (1, 1), (1, 1)) == [[[1]], [[2]]]


def test_eval_goes_over_every_example_once_longest_first():
    rows, labels = split()
    batches = EvalBatches(rows, labels, layout())
    batches_in_order = list(batches)
    assert len(batches) == len(batches_in_order) == 5
    index = np.concatenate([b.index for b in batches_in_order])
    assert sorted(index[index >= 0]) == list(range(37))
    lengths = [len(rows[i][0].ids) for i in index if i >= 0]
    assert lengths == sorted(lengths, reverse=True)
    assert sum(b.weights.sum() for b in batches_in_order) == 37
    assert batches.shapes == {b.encoder.ids.shape for b in batches_in_order}
    for again, before in zip(batches, batches_in_order, strict=True):
        same(again, before)


def test_bad_layouts():
    with pytest.raises(InputError, match="batch size 6 .* 4 hosts"):
        layout(batch=6, hosts=4)
    with pytest.raises(InputError, match="0 examples"):
        EvalBatches([], [], layout())
    with pytest.raises(InputError, match="2 rows, over num_rows 1"):
        EvalBatches([[encoded(3), encoded(3)]], [0], layout())
