"""Roles are counted as srl-eval.pl does, and the best legal tags are those of a full search."""

import itertools

import numpy as np
import pytest
from srl_eval import f1_of, official

from jaxprompt.scoring.metrics import score_tags
from jaxprompt.scoring.viterbi import best_tags

CASES = [  # gold, predicted, right, found, there are
    ("B-A0 I-A0 B-V B-A1", "B-A0 I-A0 B-V B-A1", 2, 2, 2),  # V does not count
    ("B-A0 I-A0 B-V B-A1", "B-A0 O O B-A1", 1, 2, 2),
    ("B-A1 B-V B-C-A1", "B-A1 B-V B-C-A1", 1, 1, 1),  # one argument of two parts
    ("B-A1 B-V B-C-A1", "B-A1 B-V O", 0, 1, 1),
    ("B-A1 B-V O", "B-A1 B-V B-C-A1", 0, 1, 1),
    ("B-A1 O B-C-A1 B-V B-C-A1", "B-A1 O B-C-A1 B-V O", 0, 1, 1),
    ("O B-C-A1 B-V", "O B-A1 B-V", 1, 1, 1),  # a C-X with no X before it is an X
    ("B-C-A1 B-V B-A1", "B-A1 B-V B-A1", 2, 2, 2),
    ("B-A0 B-R-A0 B-V", "B-A0 B-A0 B-V", 1, 2, 2),  # R-X is a role of its own
    ("B-A0 B-R-A0 B-V", "B-A0 B-R-A0 B-V", 2, 2, 2),
    ("B-V B-C-V B-A1", "B-V O B-A1", 1, 1, 1),  # nor does what goes on with V
    ("B-A1 B-A1 B-C-A1", "B-A1 O B-C-A1", 0, 1, 2),  # the latest A1 goes on
    ("B-A0 B-V", "I-A0 B-V", 1, 1, 1),  # I- begins what nothing went before
    ("B-V O", "B-V O", 0, 0, 0),
]


@pytest.mark.parametrize("gold, pred, right, actual, there", CASES)
def test_cases_by_hand(gold, pred, right, actual, there):
    scores = score_tags("role_f1", [gold.split()], [pred.split()])
    assert scores["precision"] == (right / actual if actual else 0)
    assert scores["recall"] == (right / there if there else 0)
    assert official([gold.split()], [pred.split()]) == (right, actual - right, there - right)


def test_any_tags_count_as_the_official_script_counts():
    rng = np.random.default_rng(0)
    kinds = ["A0", "A1", "C-A0", "C-A1", "R-A0", "V", "C-V", "C-R-A0"]
    names = ["O", *(f"{x}-{kind}" for kind in kinds for x in "BI")]
    gold, pred = [], []
    for _ in range(300):
        gold.append([str(tag) for tag in rng.choice(names, rng.integers(1, 12))])
        mend = rng.random(len(gold[-1])) < 0.3
        pred.append([str(rng.choice(names)) if m else g for g, m in zip(gold[-1], mend)])  # noqa: B905
    scores = score_tags("role_f1", gold, pred)
    expected = f1_of(*official(gold, pred))
    assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert 0.1 < scores["role_f1"] < 0.9
    right = [g == p for a, b in zip(gold, pred, strict=True) for g, p in zip(a, b, strict=True)]
    assert scores["accuracy"] == np.mean(right)


@pytest.mark.parametrize("metric, other", [("role_f1", "entity_f1"), ("entity_f1", "role_f1")])
def test_seqeval_counts_the_predicate_and_srl_eval_does_not(metric, other):
    """Of two roles one is right: 1 of 2 by srl-eval.pl, 2 of 3 with V by seqeval."""
    tags = [["B-A0", "B-V", "B-A1"]], [["B-A0", "B-V", "B-A2"]]
    scores = score_tags(metric, *tags, has_predicates=True)
    assert (scores["role_f1"], scores["entity_f1"]) == pytest.approx((1 / 2, 2 / 3))
    assert list(scores) == [metric, "precision", "recall", "accuracy", other]
    assert scores["precision"] == scores[metric]


@pytest.mark.parametrize("names", ["O B-A I-A B-B I-B", "I-A B-A O I-B B-B", "O B-A I-A B-B"])
def test_the_best_tags_are_those_of_a_full_search(names):
    names = names.split()
    rng = np.random.default_rng(1)

    def is_legal(tags):
        befores = ["O", *tags]
        goes_on = lambda old, tag: old != "O" and old[2:] == tag[2:]
        pairs = zip(befores, tags, strict=False)
        return all(tag[0] != "I" or goes_on(old, tag) for old, tag in pairs)

    for words in range(1, 6):
        legal = [p for p in itertools.product(range(len(names)), repeat=words)
                 if is_legal([names[i] for i in p])]  # fmt: skip
        for _ in range(20):
            chances = 3 * rng.normal(size=(words, len(names)))
            sums = [sum(chances[w, i] for w, i in enumerate(path)) for path in legal]
            assert tuple(best_tags(chances, names)) == legal[int(np.argmax(sums))]


def test_of_legal_tags_the_best_are_those_of_each_word():
    names = ["O", "B-A", "I-A"]
    chances = np.log(np.array([[0.2, 0.7, 0.1], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]]))
    assert best_tags(chances, names).tolist() == [1, 2, 0]
    assert best_tags(np.log(np.array([[0.1, 0.2, 0.7]])), names).tolist() == [1]
