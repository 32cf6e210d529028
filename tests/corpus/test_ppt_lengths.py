"""Neither lengths nor documents tell a label of a pre-training task."""

import numpy as np
import pytest
from ppt_corpus import (
    bert_forms,
    close_corpus,
    guess_by_trees,
    make_corpus,
    number_documents,
    text_lengths,
    unit_numbers,
)

from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.corpus.ppt import nsp, selection
from jaxprompt.corpus.ppt.units import Units, length_class_edges

COUNT = 1500


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return close_corpus(tmp_path_factory.mktemp("close") / "store")


def draw(name, corpus, matched):
    forms = bert_forms(name, options=(4,) if name == "unified" else None)
    if name == "nsp":
        task = nsp.make(corpus, range(len(corpus)), forms, matched=matched)
    else:
        task = selection.make(name, corpus, range(len(corpus)), forms, matched=matched)
    return task, [task(i % len(task), sample_rng(0, i)) for i in range(COUNT)]


@pytest.mark.parametrize("name", ["nsp", "nss", "unified"])
def test_trees_do_not_beat_chance(name, corpus):
    task, examples = draw(name, corpus, True)
    chance = task.majority
    assert guess_by_trees(examples) < chance + 3 * (chance * (1 - chance) / COUNT) ** 0.5


def test_trees_see_what_lengths_tell(corpus):
    """Else the test above could not fail."""
    task, examples = draw("nsp", corpus, False)
    assert guess_by_trees(examples) > task.majority + 0.1


@pytest.mark.parametrize("matched", [True, False])
def test_options_are_cut_to_the_shortest(corpus, matched):
    """Which loses less than a class of lengths is wide; without `matched` nothing is lost."""
    task, examples = draw("nss", corpus, matched)
    options = text_lengths(examples)[:, 1:]
    equal = (options == options[:, :1]).all(1)
    assert equal.all() if matched else equal.mean() < 0.1
    if matched:
        whole = [len(task.units.ids(i)) for i in range(len(task.units))]
        assert options.mean() > 0.9 * np.mean(whole)


def test_classes_of_lengths_grow_by_a_quarter_and_by_a_token_at_least():
    """The shortest ones are a token apart, where a quarter more is the same length."""
    assert length_class_edges(2, 11) == [2, 3, 4, 5, 6, 7, 8, 10, 11]
    assert length_class_edges(16, 32) == [16, 20, 25, 31, 32] and length_class_edges(8, 8) == [8]


def test_the_class_of_a_length_and_its_units(tmp_path):
    corpus = make_corpus(tmp_path / "store", number_documents([[16, 17, 20, 31, 40, 15]]))
    units = Units(corpus, range(1), min_tokens=16, min_units=2, max_length=32)
    assert [units.length_class(n) for n in (16, 19, 20, 24, 25, 31, 32, 99)] == [
        0, 0, 1, 1, 2, 3, 4, 4
    ]  # fmt: skip
    assert len(units) == 5 and units.num_short == 1
    assert units.same_length(range(5), 0, 9).tolist() == [0, 1]


@pytest.mark.parametrize("name", ["nsp", "nss"])
def test_every_other_document_is_as_likely_as_any(name, tmp_path):
    """Of 60 documents the 10 longest, with two thirds of all units, give a sixth of the others."""
    sizes = [60] * 10 + [6] * 50
    corpus = make_corpus(tmp_path / "store", number_documents([[6] * size for size in sizes]))
    document = np.repeat(np.arange(60), sizes)
    _, examples = draw(name, corpus, True)
    long, others = 0, 0
    for row, _ in examples:
        first, *rest = document[unit_numbers(row)]
        long += sum(one < 10 for one in rest if one != first)
        others += sum(one != first for one in rest)
    # A query stands in one of the 10 longest with 600 / 900: then 9 of 59 others are long.
    share = 2 / 3 * 9 / 59 + 1 / 3 * 10 / 59
    assert abs(long / others - share) < 3 * (share * (1 - share) / others) ** 0.5
