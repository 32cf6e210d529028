"""Next-sentence selection with 6 and with 2 to 16 options: what they are and where they stand."""

from collections import Counter

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
from jaxprompt.corpus.ppt import get_pattern, make_forms, option_counts, selection
from jaxprompt.errors import InputError

UNITS = 12  # of each document below
# Options -> tokens of the query and of an option; the neighbour, others of its document, and those
# of each other document (released code).
TABLE = {
    2: (400, 50, 1, 1), 3: (400, 50, 1, 1, 1), 4: (400, 50, 1, 1, 1, 1),
    5: (400, 40, 1, 1, 1, 1, 1), 6: (300, 40, 1, 1, 1, 1, 1, 1), 7: (250, 30, 1, 2, 1, 1, 1, 1),
    8: (200, 30, 1, 2, 2, 1, 1, 1), 9: (200, 30, 1, 2, 2, 2, 1, 1),
    10: (150, 20, 1, 2, 2, 2, 2, 1), 11: (150, 20, 1, 3, 2, 2, 2, 1),
    12: (150, 20, 1, 3, 2, 2, 2, 2), 13: (150, 20, 1, 3, 3, 2, 2, 2),
    14: (150, 20, 1, 3, 3, 3, 2, 2), 15: (150, 20, 1, 3, 3, 3, 3, 2),
    16: (150, 20, 1, 3, 3, 3, 3, 3),
}  # fmt: skip


def draw(task, count, seed=0):
    return [task(i % len(task), sample_rng(seed, i)) for i in range(count)]


def kind(one, first):
    """0 = of another document, 1 = of the same, 2 = a neighbour."""
    return (one // UNITS == first // UNITS) * (1 + (abs(one - first) == 1))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return even_corpus(tmp_path_factory.mktemp("even") / "store", 20, UNITS)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return even_corpus(tmp_path_factory.mktemp("long") / "store", 12, UNITS, 500)


@pytest.fixture(scope="module")
def task(corpus):
    return selection.make("nss", corpus, range(len(corpus)), bert_forms("nss"))


def test_a_row_for_t5_as_released(t5, corpus):
    """Query ? A . option . B . option . ? The correct one is <extra_id_0>, letters unspaced."""
    forms = make_forms(
        get_pattern("unified"), t5, "seq2seq", num_slots=2, max_len=64, options=(3,),
        answer="[mask] {label} [mask]", whole=True,
    )  # fmt: skip
    row, label = selection.make("unified", corpus, range(20), forms)(30, sample_rng(0, 1))
    query, *options = ([FIRST + number] * 6 for number in unit_numbers(row))
    assert row.ids.tolist() == [
        0, 0, *query, 58, 188, 5, *options[0], 5, 279, 5, *options[1], 5, 254, 5, *options[2], 5,
        58, 37, 2024, 80, 19, 32099,
    ]  # fmt: skip
    assert query == [FIRST + 30] * 6 and abs(unit_numbers(row)[1 + label] - 30) == 1
    letters = [188, 279, 254, 308, 427, 371, 517, 566, 196, 683, 439, 434, 329, 567, 667, 345]
    assert forms.verbalizer.ids[:, 0, 0].tolist() == letters
    # Sentinel, letter, sentinel are read: behind the start, <extra_id_0>, and each letter.
    assert row.decoder.ids.tolist() == [0, 32099, *letters]
    assert row.label_pos.tolist() == [0, 1, *range(2, 18)]
    assert forms.plan.whole.ids[0, 0].tolist() == [32099, 188, 32098]


def test_examples_never_change(corpus):
    forms = bert_forms("unified", options=(2, 4))
    task = selection.make("unified", corpus, range(20), forms)
    actual = [(*unit_numbers(row), label) for row, label in draw(task, 5, seed=3)]
    assert actual == [  # 12 units a document; the query, its options, where the neighbour stands
        (0, 20, 11, 202, 1, 3), (1, 43, 2, 11, 180, 1), (2, 3, 10, 167, 117, 0),
        (3, 8, 2, 175, 35, 1), (4, 6, 5, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("number", TABLE)
def test_each_row_of_the_table(number, long):
    query, option, *counts = TABLE[number]
    assert sum(counts) == number
    task = selection.make("unified", long, range(12), bert_forms("unified", options=(number,)))
    for row, label in draw(task, 20):
        assert [len(text) for text in texts_of(row)] == [query] + [option] * number
        first, *options = unit_numbers(row)
        assert abs(options[label] - first) == 1
        kinds = [kind(one, first) for one in options]
        assert kinds.count(2) == 1 and kinds.count(1) == counts[1]
        others = Counter(one // UNITS for one in options if one // UNITS != first // UNITS)
        assert sorted(others.values(), reverse=True) == counts[2:]
        assert len(set(options)) == number and first not in options


def test_a_random_guess_is_right_in_one_of_n(task, corpus):
    both = selection.make("unified", corpus, range(20), bert_forms("unified", options=(2, 3)))
    assert both.majority == pytest.approx((1 / 2 + 1 / 3) / 2) and task.majority == 1 / 6


def test_six_options_of_nss(long):
    task = selection.make("nss", long, range(12), bert_forms("nss"))
    for row, label in draw(task, 50):
        assert [len(text) for text in texts_of(row)] == [389] + [86] * 6
        first, *options = unit_numbers(row)
        kinds = sorted(kind(one, first) for one in options)
        assert kinds == [0, 0, 0, 0, 1, 2] and abs(options[label] - first) == 1
        assert len({one // UNITS for one in options}) == 5


def test_no_option_equals_another_as_it_is_shown(tmp_path):
    """Texts with the same beginning are the same where only that is shown."""
    rng = np.random.RandomState(0)
    documents = [
        [[FIRST + rng.randint(25)] * 60 + [FIRST + 30 + i, FIRST + 50 + d] for i in range(20)]
        for d in range(12)
    ]
    corpus = make_corpus(tmp_path / "store", documents)
    task = selection.make("unified", corpus, range(12), bert_forms("unified", options=(4, 8, 16)))
    for row, label in draw(task, 300):
        query, *options = (tuple(text) for text in texts_of(row))
        assert len(set(options)) == len(options)
        assert query[: len(options[0])] not in options[:label] + options[label + 1 :]


def test_too_long_a_row_keeps_every_option(t5, long):
    forms = make_forms(get_pattern("nss"), t5, "seq2seq", num_slots=100, max_len=1024, options=(6,))
    row, _ = selection.make("nss", long, range(12), forms)(5, sample_rng(0, 0))
    # 100 slots, 6 options of 86 with 3 tokens each, 7 others: 383 of 389 are left for the query.
    assert len(row.ids) == 1024 and [len(text) for text in texts_of(row)] == [383] + [86] * 6
    assert row.ids[-1] == 32099 and (row.slot >= 0).sum() == 100
    short = bert_forms("unified", max_len=90)
    task = selection.make("unified", long, range(12), short)
    for row, _ in draw(task, 40):
        query, *options = (len(text) for text in texts_of(row))
        assert len(row.ids) == 90 and query >= options[0] > 0 and len(set(options)) == 1
        assert row.ids[row.label_pos].tolist() == [4] and (row.slot >= 0).sum() == 4
    message = "leaves 9 tokens of max_len 70 for 17 texts; raise max_len to 78"
    with pytest.raises(InputError, match=message):
        bert_forms("unified", max_len=70)


@pytest.mark.parametrize("bounds", [(1, 4), (2, 17), (5, 3), (0, 0)])
def test_options_out_of_range(bounds):
    with pytest.raises(InputError, match=f"{bounds[0]} to {bounds[1]} options .* 2 to 16"):
        option_counts("unified", *bounds)
    assert option_counts("nss") == (6,) and option_counts("unified", 3, 5) == (3, 4, 5)


@pytest.mark.parametrize(("number", "needed"), [(2, 1), (3, 2), (5, 4), (6, 5), (16, 5)])
def test_documents_needed(corpus, number, needed):
    forms = bert_forms("unified", options=(number,))
    assert len(selection.make("unified", corpus, range(needed), forms)) == needed * UNITS
    if needed > 1:
        with pytest.raises(InputError, match=f"unified needs {needed} such documents; set corpus"):
            selection.make("unified", corpus, range(needed - 1), forms)


def test_documents_of_five_units_are_enough_for_nss_alone(tmp_path):
    corpus = make_corpus(tmp_path / "store", number_documents([[6] * 5] * 6))
    assert len(selection.make("nss", corpus, range(6), bert_forms("nss"))) == 30
    with pytest.raises(InputError, match="0 of 6 documents have 6 units of 5 tokens"):
        selection.make("unified", corpus, range(6), bert_forms("unified"))
