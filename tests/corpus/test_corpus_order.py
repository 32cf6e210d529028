"""The order of documents: permutations that look drawn at random, a held-out part, epochs."""

from collections import Counter

import numpy as np
import pytest

from jaxprompt.corpus import Shuffle, split_held_out
from jaxprompt.errors import InputError


def chi_square(counts, cells):
    """The share of fair draws that are at least as uneven."""
    from scipy.stats import chisquare

    return chisquare([counts.get(cell, 0) for cell in cells]).pvalue


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 64, 65, 1000, 4097])
def test_a_shuffle_holds_every_number_once(n):
    actual = [Shuffle(n, 5, 1)[i] for i in range(n)]
    assert list(Shuffle(n, 5, 1)) == actual
    assert len(Shuffle(n, 5)) == n and sorted(actual) == list(range(n))
    for outside in (-1, n):
        with pytest.raises(IndexError):
            Shuffle(n, 5)[outside]


def test_a_shuffle_depends_on_its_seeds_alone():
    expected = [0, 2, 3, 4, 7, 1, 8, 6, 9, 5]
    assert [list(Shuffle(10, 3, 4)) for _ in range(2)] == [expected, expected]
    assert len({tuple(Shuffle(10, *seeds)) for seeds in [(3, 4), (4, 3), (3,), (3, 0)]}) == 4


def test_places_and_neighbours_of_many_look_random():
    n, bins = 1500, 15
    places, pairs = Counter(), Counter()
    for seed in range(20):
        order = np.array(Shuffle(n, seed)) * bins // n
        places.update(zip(np.arange(n) * bins // n, order, strict=True))
        pairs.update(zip(order[:-1], order[1:], strict=True))
    cells = [(i, j) for i in range(bins) for j in range(bins)]
    assert chi_square(places, cells) > 1e-3 and chi_square(pairs, cells) > 1e-3


def test_a_place_among_billions():
    order = Shuffle(2**40 + 7, 1)
    actual = [order[i] for i in range(0, 2**40, 2**31)]
    assert len(set(actual)) == len(actual) and max(actual) < 2**40 + 7
    assert 0.4 < np.mean(actual) / 2**40 < 0.6


def test_documents_are_divided_by_seed():
    train, held_out = split_held_out(1000, 0.1, seed=3)
    assert len(train) == 900 and len(held_out) == 100
    assert sorted([*train, *held_out]) == list(range(1000))
    assert [list(side) for side in split_held_out(1000, 0.1, seed=3)] == [
        train.tolist(),
        held_out.tolist(),
    ]
    assert set(split_held_out(1000, 0.1, seed=4)[1]) != set(held_out)
    assert len(split_held_out(10, 0.001, seed=0)[1]) == 1
    assert len(split_held_out(10, 0, seed=0)[1]) == 0


def test_bad_shares():
    with pytest.raises(InputError, match="held_out=0.01 holds out 1 of 1 documents, which leaves"):
        split_held_out(1, 0.01, 0)
