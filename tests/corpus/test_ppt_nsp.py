"""Next-sentence prediction: what stands where, a third each, and nothing to guess a label from."""

import numpy as np
import pytest
from ppt_corpus import (
    FIRST,
    bert_forms,
    even_corpus,
    make_corpus,
    number_documents,
    texts_of,
    unit_numbers,
)

from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.corpus.ppt import get_pattern, make_forms, nsp
from jaxprompt.errors import InputError
from jaxprompt.types import Role

LABELS = {"no": 0, "maybe": 1, "yes": 2}


def draw(task, count, seed=0):
    return [task(i % len(task), sample_rng(seed, i)) for i in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return even_corpus(tmp_path_factory.mktemp("even") / "store", 12, 6)


@pytest.fixture(scope="module")
def task(corpus):
    return nsp.make(corpus, range(len(corpus)), bert_forms("nsp"))


def test_a_row_for_t5_as_released(t5, corpus):
    """P slots, first, <extra_id_0>, second; the decoder is fed its start and <extra_id_0>."""
    forms = make_forms(get_pattern("nsp"), t5, "seq2seq", num_slots=3, max_len=32)
    task = nsp.make(corpus, range(len(corpus)), forms)
    row, label = task(7, sample_rng(0, 1))
    first, second = unit_numbers(row)
    assert row.ids.tolist() == [0] * 3 + [FIRST + 7] * 6 + [32099] + [FIRST + second] * 6
    assert first == 7
    assert row.slot.tolist() == [0, 1, 2] + [-1] * 13
    roles = [Role.SOFT] * 3 + [Role.TEXT] * 6 + [Role.LABEL] + [Role.TEXT] * 6
    assert row.roles.tolist() == roles
    assert row.positions.tolist() == [*range(16)] and not row.types.any()
    assert row.decoder.ids.tolist() == [0, 32099] and row.label_pos.tolist() == [1]
    assert forms.verbalizer.ids.tolist() == [[[150]], [[2087]], [[4273]]]  # no, maybe, yes
    assert forms.verbalizer.words[label] in (("no",), ("maybe",), ("yes",))
    assert row.targets is None and row.segments is None


def test_examples_never_change(task):
    """A run that goes on after an update of this package must draw what it would have drawn."""
    actual = [(*unit_numbers(row), label) for row, label in draw(task, 8, seed=3)]
    assert actual == [  # 6 units a document
        (0, 1, 2), (1, 2, 2), (2, 3, 2), (3, 2, 2), (4, 10, 0), (5, 4, 2), (6, 26, 0), (7, 11, 1),
    ]  # fmt: skip


def test_labels_mean_what_they_say(task):
    for index, (row, label) in enumerate(draw(task, 1500)):
        first, second = unit_numbers(row)
        assert first == index % len(task)
        same = first // 6 == second // 6
        if label == LABELS["yes"]:
            assert same and abs(first - second) == 1
        elif label == LABELS["maybe"]:
            assert same and abs(first - second) > 1
        else:
            assert not same


def test_lengths_count_no_more_where_no_unit_has_the_same(tmp_path):
    lengths = [[5, 9, 16, 28, 50], [90, 160, 280, 500, 900]]
    corpus = make_corpus(tmp_path / "store", number_documents(lengths))
    task = nsp.make(corpus, range(2), bert_forms("nsp", max_len=2000))
    assert {label for _, label in draw(task, 60)} == {0, 1, 2}


@pytest.mark.parametrize("matched", [True, False])
def test_texts_that_repeat(tmp_path, matched):
    """A text that equals the neighbour's is no negative, wherever it stands.

    Nor does a neighbour that equals the text itself make an example: to compare would tell.
    """
    rng = np.random.RandomState(0)
    documents = [[[FIRST + rng.randint(5)] * 6 for _ in range(8)] for _ in range(6)]
    corpus = make_corpus(tmp_path / "store", documents)
    units = [unit[0] for document in documents for unit in document]
    task = nsp.make(corpus, range(6), bert_forms("nsp"), matched=matched)
    kinds = set()
    for row, label in draw(task, 400):
        first, second = (text[0] for text in texts_of(row))
        beside = {
            units[i + step] for i, unit in enumerate(units) if unit == first for step in (-1, 1)
            if 0 <= i + step < len(units) and i // 8 == (i + step) // 8
        }  # fmt: skip
        kinds.add((label, second in beside))
        assert label != 2 or second in beside
        assert second != first
    assert (2, True) in kinds
    same = make_corpus(tmp_path / "same", [[[FIRST] * 6] * 8] * 6)
    task = nsp.make(same, range(6), bert_forms("nsp"))
    with pytest.raises(
        InputError, match="no example was found in 1000 units: .* remove the duplicates"
    ):
        task(0, sample_rng(0, 0))


def test_the_other_neighbour_is_no_negative(tmp_path):
    """Nor is a unit elsewhere, in the same document or in another, that repeats its text."""
    rng, refrains = np.random.RandomState(0), [[FIRST + i] * 6 for i in range(3)]
    documents = [
        [refrains[rng.randint(3)] if i % 3 == 1 else [FIRST + 10 + 12 * d + i] * 6
         for i in range(12)]
        for d in range(4)
    ]  # fmt: skip
    corpus = make_corpus(tmp_path / "store", documents)
    task = nsp.make(corpus, range(4), bert_forms("nsp"))
    units, visited = [unit[0] for document in documents for unit in document], set()
    for i in range(1500):
        row, label = task(i % 48, sample_rng(0, i))
        first, second = (text[0] for text in texts_of(row))
        if first < FIRST + 10:  # a refrain stands in several places
            continue
        at = units.index(first)
        beside = {units[j] for j in (at - 1, at + 1) if 0 <= j < 48 and j // 12 == at // 12}
        assert (second in beside) == (label == 2)
        visited.add((label, second < FIRST + 10))
    assert visited == {(label, is_refrain) for label in range(3) for is_refrain in (True, False)}


def test_what_is_too_short_is_left_out_and_counted(tmp_path):
    lengths = [[6, 4, 6, 6, 6, 6], [6, 6, 6, 6], [6, 6, 6, 6, 6], [6, 6, 6, 6, 3, 1]]
    corpus = make_corpus(tmp_path / "store", number_documents(lengths))
    task = nsp.make(corpus, range(4), bert_forms("nsp"))
    assert len(task) == 10 and task.units.documents == 2 and task.units.num_short == 3
    assert task.units.summary() == (
        "10 units of 2 documents; excluded: 3 units below 5 tokens, "
        "2 documents with fewer than 5 other units"
    )
    numbers = {number for row, _ in draw(task, 500) for number in unit_numbers(row)}
    assert numbers == {0, 2, 3, 4, 5, *range(10, 15)}
    # What is left out parts no neighbours.
    pairs = {tuple(unit_numbers(row)) for row, label in draw(task, 500) if label == 2}
    assert (0, 2) in pairs and (2, 0) in pairs


def test_a_single_document_is_too_few(corpus):
    message = "1 of 1 documents have 5 units of 5 tokens or more, but nsp needs 2 such documents"
    with pytest.raises(InputError, match=message):
        nsp.make(corpus, [3], bert_forms("nsp"))


def test_only_the_documents_given_are_drawn_from(corpus):
    task = nsp.make(corpus, [9, 2, 5], bert_forms("nsp"))
    documents = {number // 6 for row, _ in draw(task, 300) for number in unit_numbers(row)}
    assert documents == {2, 5, 9}


def test_what_is_too_long_is_cut(tmp_path):
    """The slots and the mask stay; the longer text loses its end first."""
    lengths = [[100, 20, 100, 20, 100, 20], [20, 100, 20, 100, 20, 100]]
    corpus = make_corpus(tmp_path / "store", number_documents(lengths))
    task = nsp.make(corpus, range(2), bert_forms("nsp", max_len=64))
    for row, _ in draw(task, 100):
        sizes = [len(text) for text in texts_of(row)]
        assert (row.slot >= 0).sum() == 4 and row.ids[row.label_pos].tolist() == [4]
        assert row.ids[-1] == 3 and len(row.ids) <= 64
        assert sizes in ([20, 20], [37, 20], [20, 37], [29, 28])
        assert len(row.ids) == 64 or sizes == [20, 20]


def test_lengths_a_hundredfold_apart_make_no_pair(tmp_path):
    lengths = [[5, 600, 600, 600, 600, 600, 600], [600] * 6]
    corpus = make_corpus(tmp_path / "store", number_documents(lengths))
    task = nsp.make(corpus, range(2), bert_forms("nsp", max_len=2000))
    assert all(0 not in unit_numbers(row) for row, _ in draw(task, 300))
