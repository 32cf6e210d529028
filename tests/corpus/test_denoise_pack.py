"""Rows planned from lengths: nothing lost, nothing twice, rows full, documents in order."""

import numpy as np
import pytest

from jaxprompt.corpus.denoise import clm, mlm, prefix_lm, span_corruption
from jaxprompt.corpus.denoise.pack import Capacity, pack_documents, slice_document
from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.errors import InputError

LENGTHS = np.random.RandomState(0).randint(0, 90, 300)
WORDS = np.arange(10, 50, dtype=np.int32)
MARKS = np.arange(999, 899, -1, dtype=np.int32)
PLAIN = Capacity(np.arange(11)[None], (10,))


def framed(length, **changes):
    return mlm.Denoiser(length, 3, (1,), (2,), WORDS, **changes)


def test_a_plan_by_hand():
    plan = pack_documents([4, 0, 12, 3, 20], PLAIN)
    assert [plan.chunks(i) for i in range(len(plan))] == [
        [(0, 0, 4), (2, 0, 6)],
        [(2, 6, 12), (3, 0, 3), (4, 0, 1)],
        [(4, 1, 11)],
        [(4, 11, 20)],
    ]


def test_without_packing_a_row_has_one_piece():
    plan = pack_documents([4, 0, 12], PLAIN, packed=False)
    assert [plan.chunks(i) for i in range(len(plan))] == [[(0, 0, 4)], [(2, 0, 10)], [(2, 10, 12)]]


def test_short_pieces_are_left_out():
    plan = pack_documents([9, 5, 1, 11], PLAIN._replace(min_tokens=2))
    rows = [plan.chunks(i) for i in range(len(plan))]
    assert rows == [[(0, 0, 9)], [(1, 0, 5), (3, 0, 5)], [(3, 5, 11)]]


def test_pieces_may_end_within_the_tail():
    document, whole = np.array([5, 6, 7]), [5, 6, 7, 8, 9]
    for start in range(5):
        for stop in range(start + 1, 6):
            assert slice_document(document, start, stop, (8, 9)).tolist() == whole[start:stop]


OBJECTIVES = [
    framed(32),
    framed(32, separate=True),
    span_corruption.Denoiser(32, 0, 1, MARKS),
    span_corruption.Denoiser(32, 0, 1, MARKS, separate=True),
    prefix_lm.Denoiser(32, 0, 1, (1,)),
    prefix_lm.Denoiser(32, 0, 1, (1,), separate=True),
    prefix_lm.Denoiser(32, 0, 1, (), 0.5, (99,), separate=True),
    clm.Denoiser(32, (9,)),
    clm.Denoiser(32, (9,), separate=True),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.__module__}-{o.separate}")
@pytest.mark.parametrize("packed", [True, False])
def test_every_token_is_in_one_row_that_fits(objective, packed):
    capacity, end_ids = objective.capacity, objective.end_ids
    lengths = LENGTHS + len(end_ids)
    documents = [np.arange(n) % 800 + 10 for n in LENGTHS]
    plan = pack_documents(lengths, capacity, packed=packed)
    counts = [0] * len(lengths)
    order = []
    for index in range(len(plan)):
        row = plan.chunks(index)
        pieces = []
        for document, start, stop in row:
            assert start == counts[document] and stop - start >= capacity.min_tokens
            counts[document] = stop
            order.append(document)
            pieces.append(slice_document(documents[document], start, stop, end_ids))
            whole = [*documents[document], *end_ids]
            assert pieces[-1].tolist() == whole[start:stop] and pieces[-1].dtype == np.int32
        sample = objective(pieces, sample_rng(0, index))
        assert len(sample.encoder.ids) <= objective.lengths[0]
        assert len(sample.targets) == len(sample.label_pos) <= objective.max_targets
        if sample.decoder is not None:
            assert len(sample.decoder.ids) <= objective.lengths[1]
        segments = sample.encoder.segments
        assert segments.max() == len(row) if objective.separate else segments is None
        if not packed:
            assert len(row) == 1
        elif index + 1 < len(plan):
            cost = sum(capacity.cost[:, stop - start] for _, start, stop in row)
            free = np.array(capacity.length) - cost
            assert (capacity.cost[:, capacity.min_tokens] > free).any(), "a larger chunk would fit"
    assert order == sorted(order)
    assert all(0 <= n - used < capacity.min_tokens for n, used in zip(lengths, counts, strict=True))


def test_documents_without_text():
    with pytest.raises(InputError, match="none of 3 documents has at least 2 tokens"):
        pack_documents([0, 1, 1], PLAIN._replace(min_tokens=2))
