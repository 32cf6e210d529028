"""Batches of an objective's rows: any of them from its number alone, on any number of hosts."""

import numpy as np
import pytest

from jaxprompt.corpus import TextSettings, index_corpus
from jaxprompt.corpus.denoise import clm, mlm, span_corruption
from jaxprompt.corpus.denoise.batches import DenoisingSamples, EvalBatches, ShuffledBatches
from jaxprompt.corpus.denoise.pack import pack_documents, slice_document
from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.errors import InputError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(90))]
PAD, MASK, LENGTH, BATCH = 0, 4, 16, 8
MARKS = np.arange(100, 110, dtype=np.int32)
OBJECTIVES = {
    "mlm": mlm.Denoiser(LENGTH, MASK, (2,), (3,), np.arange(5, 95, dtype=np.int32)),
    "apart": mlm.Denoiser(
        LENGTH, MASK, (2,), (3,), np.arange(5, 95, dtype=np.int32), separate=True
    ),
    "clm": clm.Denoiser(LENGTH, (3,)),
    "span_corruption": span_corruption.Denoiser(LENGTH, 0, 1, MARKS),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Sixty documents of 3 to 30 words, no two rows of which are alike."""
    from transformers import BertTokenizer

    folder, draw = tmp_path_factory.mktemp("corpus"), np.random.RandomState(0)
    lines = [" ".join(f"w{i}" for i in draw.randint(0, 90, n)) for n in draw.randint(3, 31, 60)]
    (folder / "x.txt").write_text("\n".join(lines))
    vocab = {word: i for i, word in enumerate(WORDS)}
    return index_corpus(
        str(folder / "x.txt"), BertTokenizer(vocab=vocab), folder / "store",
        TextSettings(documents="line"), processes=1,
    )  # fmt: skip


DOCUMENTS = range(8, 60)


def make_rows(corpus, name="mlm", packed=True) -> DenoisingSamples:
    return DenoisingSamples(corpus, DOCUMENTS, OBJECTIVES[name], packed=packed, pad_id=PAD)


def take(batches, count: int) -> list:
    return [next(batches) for _ in range(count)]


def leaves(batch) -> list[np.ndarray]:
    """Lists the arrays of a batch, those of its streams too."""
    streams = [x for part in (batch.encoder, batch.decoder) if part is not None for x in part]
    rest = [*streams, batch.label_pos, batch.labels, batch.weights, batch.index, batch.targets]
    return [x for x in rest if x is not None]


def same(batch, other) -> bool:
    pairs = zip(leaves(batch), leaves(other), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def restored(batch) -> list[tuple[int, ...]]:
    """Puts the targets back into the rows of a masked batch. -> the ids of each, as `shown`"""
    ids = batch.encoder.ids.copy()
    row, at = np.nonzero(batch.targets >= 0)
    ids[row, batch.label_pos[row, at]] = batch.targets[row, at]
    return shown(batch._replace(encoder=batch.encoder._replace(ids=ids)))


def shown(batch) -> list[tuple[int, ...]]:
    """Lists the ids of each row, without padding."""
    rows = zip(batch.encoder.ids, batch.encoder.mask, strict=True)
    return [tuple(ids[mask].tolist()) for ids, mask in rows]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_is_what_the_objective_makes_of_its_pieces(corpus, name, packed):
    objective, rows = OBJECTIVES[name], make_rows(corpus, name, packed)
    lengths = [len(corpus.tokens(d)) + len(objective.end_ids) for d in DOCUMENTS]
    plan = pack_documents(lengths, objective.capacity, packed=packed)
    assert len(rows) == len(plan) > 20
    which, visits = [5, 0, len(plan) - 1], [105, 0, 7]
    batch = rows.batch(which, visits, 3, size=4)
    assert batch.index.tolist() == [*which, -1] and batch.weights.tolist() == [1, 1, 1, 0]
    for i, (row, visit) in enumerate(zip(which, visits, strict=True)):
        pieces = [
            slice_document(corpus.tokens(DOCUMENTS[at]), start, stop, objective.end_ids)
            for at, start, stop in plan.chunks(row)
        ]
        expected = objective(pieces, sample_rng(3, visit))
        for actual, text in ((batch.encoder, expected.encoder), (batch.decoder, expected.decoder)):
            assert (actual is None) == (text is None)
            if text is None:
                continue
            n = len(text.ids)
            assert actual.mask[i].tolist() == [True] * n + [False] * (actual.mask.shape[1] - n)
            assert actual.ids[i, :n].tolist() == text.ids.tolist()
            assert (actual.ids[i, n:] == PAD).all() and (actual.slot[i] == -1).all()
            assert actual.positions[i, :n].tolist() == text.positions.tolist()
            assert (actual.segments is None) == (text.segments is None)
            if text.segments is not None:
                assert actual.segments[i, :n].tolist() == text.segments.tolist()
        m = len(expected.targets)
        assert batch.targets[i, :m].tolist() == expected.targets.tolist()
        assert batch.label_pos[i, :m].tolist() == expected.label_pos.tolist()
        assert (batch.targets[i, m:] == -1).all()
    assert not batch.encoder.mask[3].any() and (batch.targets[3] == -1).all()


def test_every_epoch_visits_every_row_once(corpus):
    rows = make_rows(corpus)
    visits = ShuffledBatches(rows, batch=BATCH, seed=0)
    per_epoch = -(-len(rows) // BATCH)
    assert visits.steps_per_epoch == per_epoch and len(rows) % BATCH
    epochs = [take(visits, per_epoch) for _ in range(2)]
    orders = [[i for batch in epoch for i in batch.index.tolist() if i >= 0] for epoch in epochs]
    assert [sorted(order) for order in orders] == [list(range(len(rows)))] * 2
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])
    for epoch in epochs:  # the last batch is filled up
        short = len(rows) % BATCH
        assert epoch[-1].weights.tolist() == [1] * short + [0] * (BATCH - short)
        assert (epoch[-1].index[short:] == -1).all() and not epoch[-1].encoder.mask[short:].any()
        assert all((batch.weights == 1).all() for batch in epoch[:-1])
        assert {batch.encoder.ids.shape for batch in epoch} == {(BATCH, LENGTH)}
    visits.close()
    texts, visited = (
        [
            {
                row: text
                for batch in epoch
                for row, text in zip(batch.index, read(batch), strict=True)
            }
            for epoch in epochs
        ]
        for read in (restored, shown)
    )
    assert texts[0] == texts[1]  # the same text in a row, of which other tokens are hidden
    assert sum(visited[0][row] != visited[1][row] for row in range(len(rows))) > 0.9 * len(rows)


def test_a_batch_depends_on_seed_and_number_alone(corpus):
    rows = make_rows(corpus)
    one, ahead = (ShuffledBatches(rows, batch=BATCH, seed=4, prefetch=n) for n in (0, 3))
    expected = take(one, 12)
    assert all(map(same, take(ahead, 12), expected))
    restarted = ShuffledBatches(rows, batch=BATCH, seed=4, prefetch=0)
    restarted.set_state({**restarted.get_state(), "iterator": stand_at(rows, 9)})
    assert same(next(restarted), expected[9])
    other = take(ShuffledBatches(rows, batch=BATCH, seed=5, prefetch=0), 12)
    assert not any(map(same, other, expected))
    ahead.close()


def stand_at(rows, number):
    """The saved position behind `number` batches, of another stream over the same rows."""
    visits = ShuffledBatches(rows, batch=BATCH, seed=77, prefetch=0)
    take(visits, number)
    return visits.get_state()["iterator"]


def test_a_position_of_another_stream_is_refused(corpus):
    state = ShuffledBatches(make_rows(corpus), batch=BATCH, seed=1, prefetch=0).get_state()
    n, single = len(make_rows(corpus)), len(make_rows(corpus, packed=False))
    cases = {
        f"has rows {n}, but this run has {single}": (dict(packed=False), {}),
        f"has batch {BATCH}, but this run has {BATCH + 8}": ({}, dict(batch=BATCH + 8)),
        "has seed 1, but this run has 2; resume with the same corpus": ({}, dict(seed=2)),
    }
    for message, (changed, position) in cases.items():
        visits = ShuffledBatches(
            make_rows(corpus, **changed), **{"batch": BATCH, "seed": 1, "prefetch": 0, **position}
        )
        with pytest.raises(InputError, match=f"the saved data position {message}"):
            visits.set_state(state)


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("name", ["mlm", "span_corruption"])
def test_the_shares_of_hosts_are_the_batch_of_one(corpus, name, hosts):
    rows = make_rows(corpus, name)
    count = -(-len(rows) // BATCH) + 2
    whole = take(ShuffledBatches(rows, batch=BATCH, seed=0, prefetch=0), count)
    parts = [
        take(ShuffledBatches(rows, batch=BATCH, seed=0, prefetch=0, share=(host, hosts)), count)
        for host in range(hosts)
    ]
    for number, batch in enumerate(whole):
        shares = [leaves(part[number]) for part in parts]
        joined = [np.concatenate(pieces) for pieces in zip(*shares, strict=True)]
        assert all(map(np.array_equal, joined, leaves(batch)))
    passes = [EvalBatches(rows, batch=16, seed=0, limit=10, share=(h, hosts)) for h in range(hosts)]
    (expected,) = EvalBatches(rows, batch=16, seed=0, limit=10)
    shares = [leaves(part) for one in passes for part in one]  # some have filling alone
    joined = [np.concatenate(pieces) for pieces in zip(*shares, strict=True)]
    assert all(map(np.array_equal, joined, leaves(expected)))


def test_a_pass_is_the_same_each_time(corpus):
    rows = make_rows(corpus)
    eval_batches = EvalBatches(rows, batch=BATCH, seed=0, limit=20)
    first, again = list(eval_batches), list(eval_batches)
    assert eval_batches.size == 20 and len(first) == len(again) == 3
    assert all(map(same, first, again))
    index = np.concatenate([batch.index for batch in first])
    assert index.tolist() == [*range(20), *[-1] * 4]
    weights = np.concatenate([batch.weights for batch in first])
    assert weights.tolist() == [1] * 20 + [0] * 4
    other = list(EvalBatches(rows, batch=BATCH, seed=1, limit=20))
    assert not any(map(same, first, other))
    assert list(map(restored, first)) == list(map(restored, other))
    # Rows are drawn alike however many stand in a batch.
    (wide,) = EvalBatches(rows, batch=24, seed=0, limit=20)
    joined = [np.concatenate(pieces) for pieces in zip(*map(leaves, first), strict=True)]
    assert all(map(np.array_equal, joined, leaves(wide)))
    assert EvalBatches(rows, batch=BATCH, seed=0, limit=10**6).size == len(rows)


def test_documents_without_text_are_refused(corpus):
    objective = OBJECTIVES["mlm"]
    with pytest.raises(InputError, match="none of 0 documents has at least 1 tokens"):
        DenoisingSamples(corpus, [], objective, packed=True, pad_id=PAD)
