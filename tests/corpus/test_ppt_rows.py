"""Batches of pre-training tasks: any of them in any order, on any host, and on real text."""

import numpy as np
import pytest
from ppt_corpus import bert_forms, even_corpus

from jaxprompt.corpus.denoise.batches import EvalBatches
from jaxprompt.corpus.ppt import (
    PptSamples,
    nsp,
    selection,
)
from jaxprompt.data.batches.batching import Layout

MAX_LEN = 160


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return even_corpus(tmp_path_factory.mktemp("even") / "store", 12, 8)


@pytest.fixture(scope="module", params=["nsp", "unified"])
def rows(request, corpus):
    return make_rows(request.param, corpus, range(len(corpus)))


def make_rows(name, corpus, documents, **layout):
    if name == "nsp":
        forms = bert_forms(name)
        task = nsp.make(corpus, documents, forms)
    else:
        forms = bert_forms(name, options=(2, 5, 7))
        task = selection.make(name, corpus, documents, forms)
    return PptSamples(task, forms, Layout(1, MAX_LEN, forms.pad, **layout))


def arrays(batch):
    named = batch.encoder._asdict() | {n: getattr(batch, n) for n in ("label_pos", "labels")}
    return {name: x for name, x in (named | {"index": batch.index}).items() if x is not None}


def assert_equal(one, two):
    for name, x in arrays(one).items():
        np.testing.assert_array_equal(x, arrays(two)[name], name)


def test_any_order_gives_the_same_rows(rows):
    order = np.random.RandomState(0).permutation(40)
    straight = rows.batch(range(40), range(100, 140), 5, size=40)
    mixed = rows.batch(order.tolist(), (order + 100).tolist(), 5, size=40)
    for name, x in arrays(straight).items():
        np.testing.assert_array_equal(x[order], arrays(mixed)[name], name)


def test_a_visit_is_drawn_anew(rows):
    first, again, other = (
        rows.batch(range(40), range(start, start + 40), seed, size=40)
        for start, seed in ((0, 0), (40, 0), (0, 1))
    )
    assert (first.encoder.ids != again.encoder.ids).any()
    assert (first.encoder.ids != other.encoder.ids).any()
    np.testing.assert_array_equal(first.index, again.index)


def test_hosts_share_a_batch(rows):
    whole = rows.batch(range(10), range(10), 0, size=12)
    parts = [rows.batch(range(10), range(10), 0, size=12, share=(i, 4)) for i in range(4)]
    for name, x in arrays(whole).items():
        np.testing.assert_array_equal(x, np.concatenate([arrays(p)[name] for p in parts]), name)
    assert whole.weights.tolist() == [1.0] * 10 + [0.0] * 2
    assert whole.labels[10:].tolist() == whole.index[10:].tolist() == [-1, -1]
    assert whole.encoder.ids.shape == (12, MAX_LEN)
    assert not whole.encoder.mask[10:].any()


def test_layout_of_a_batch(corpus):
    plain, moved = (
        make_rows("nsp", corpus, range(12), **layout).batch(range(3), range(3), 0, size=3)
        for layout in ({}, {"side": "left", "shift": 7})
    )
    used = plain.encoder.mask[0].sum()
    np.testing.assert_array_equal(moved.encoder.ids[0, -used:], plain.encoder.ids[0, :used])
    assert moved.encoder.positions[0, -used:].tolist() == [*range(7, 7 + used)]
    assert (moved.label_pos - plain.label_pos == MAX_LEN - used).all()


def test_a_pass_is_always_the_same_and_of_many_documents(corpus):
    rows = make_rows("nsp", corpus, range(12))
    eval_batches = EvalBatches(rows, batch=8, seed=1, limit=20)
    first, second = list(eval_batches), list(eval_batches)
    assert len(first) == 3 and first[-1].weights.sum() == 4
    for one, two in zip(first, second, strict=True):
        assert_equal(one, two)
    units = np.concatenate([batch.encoder.ids[batch.weights > 0, 5] for batch in first]) - 2000
    assert len(set(units // 8)) > 6
