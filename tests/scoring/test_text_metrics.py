"""Metrics of written texts against values worked out by hand."""

import math

import numpy as np
import pytest

from jaxprompt.scoring import metrics
from jaxprompt.types import ABSENT


def test_exact_match_strips_and_does_nothing_else():
    gold = [["Paris"], ["a", "the  b"], ["c."], ["d"]]
    pred = [" Paris\n", "the  b", "c", "D"]
    assert metrics.score_texts("exact_match", gold, pred) == {"exact_match": 2 / 4}


def test_rouge_l_by_hand():
    gold = [
        ["the cat sat on the mat", "The cat, sat."],  # nearer to the second: all 3 of 3
        ["police killed the gunman"],
        ["x"],
    ]
    # Longest common subsequence "police the gunman": 3 of 4 and 3 of 5.
    pred = ["the cat sat", "police kill the big gunman", ""]
    expected = (1 + 2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5) + 0) / 3
    scores = metrics.score_texts("rouge_l", gold, pred)
    assert scores == pytest.approx({"rouge_l": expected, "exact_match": 0})
    assert list(scores) == ["rouge_l", "exact_match"]


def test_rouge_l_knows_letters_beyond_ascii():
    assert metrics.score_texts("rouge_l", [["你好世界"]], ["你好，GPT世界"])["rouge_l"] == (
        pytest.approx(2 * (4 / 5) / (1 + 4 / 5))
    )
    assert metrics.score_texts("rouge_l", [["café"]], ["caf"])["rouge_l"] == 0


def test_bleu_by_hand():
    # n-grams found: 5 of 5, 3 of 4, 2 of 3, 1 of 2; 5 words for 6.
    scores = metrics.score_texts("bleu", [["the cat sat on the mat"]], ["the cat sat on mat"])
    expected = math.exp(1 - 6 / 5) * (1 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)
    assert scores == pytest.approx({"bleu": expected, "exact_match": 0})
    assert list(scores) == ["bleu", "exact_match"]


def test_bleu_is_of_the_corpus_and_takes_several_references():
    # The first counts 5 + 4 + 3 + 2 n-grams, all in its second reference; the second, one word, 1.
    gold = [["no word in common here", "a b c d e"], ["f"]]
    assert metrics.score_texts("bleu", gold, ["a b c d e", "f"])["bleu"] == pytest.approx(1)
    # One unigram of 6 is wrong; the length is that of the references.
    scores = metrics.score_texts("bleu", gold, ["a b c d e", "g"])["bleu"]
    assert scores == pytest.approx((5 / 6) ** (1 / 4))


def test_bleu_splits_chinese_into_characters():
    # 4 of 5, 3 of 4, 2 of 3, 1 of 2: the last character is wrong.
    scores = metrics.score_texts("bleu", [["今天天气好"]], ["今天天气坏"])["bleu"]
    assert scores == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4))


def test_likelihoods_are_per_token():
    logp = np.array([[-0.5, -1.5, ABSENT], [-4.0, ABSENT, ABSENT]], np.float32)
    expected = {"loss": 2.0, "perplexity": math.exp(2)}
    for name in metrics.LIKELIHOODS:
        scores = metrics.score_likelihoods(name, logp)
        assert scores == pytest.approx(expected) and next(iter(scores)) == name
        assert metrics.selection_score(scores) == pytest.approx(-expected[name])
    assert metrics.selection_score({"exact_match": 0.5, "loss": 2.0}) == 0.5
    assert metrics.selection_score({"exact_match": 0.5, "loss": 2.0}, "loss") == -2.0


@pytest.mark.parametrize("name", ["exact_match", "rouge_l", "bleu"])
def test_bounds(name):
    gold = [["one two three four five"], ["six seven eight nine ten"]]
    right = [texts[0] for texts in gold]
    assert metrics.score_texts(name, gold, right)[name] == pytest.approx(1)
    assert metrics.score_texts(name, gold, ["", ""])[name] == 0


def test_several_samples_are_averaged_and_vote():
    gold = [["4"], ["7", "seven"], ["9"]]
    samples = [["4", "4 ", "5"], ["1", "seven", "2"], ["8", "9", "8"]]
    scores = metrics.score_samples("exact_match", gold, samples)
    # Of the second example's texts each occurs once, and the first of them counts.
    assert scores == pytest.approx({"exact_match": 4 / 9, "maj@3": 1 / 3, "pass@3": 1.0})
    one = metrics.score_samples("exact_match", gold, [texts[:1] for texts in samples])
    assert one == metrics.score_texts("exact_match", gold, ["4", "1", "8"])


def test_empty_texts_do_not_vote():
    scores = metrics.score_samples("exact_match", [["4"], ["5"]], [["", "", "4"], ["", "", ""]])
    assert scores["maj@3"] == 0.5


def test_a_text_metric_is_the_mean_of_the_samples():
    gold, samples = [["a b"], ["c"]], [["a b", "a"], ["c", "d"]]
    scores = metrics.score_samples("rouge_l", gold, samples)
    # Each first text is right; of "a b" and "a" the longest common subsequence is 1 of 2 and 1.
    assert scores["rouge_l"] == pytest.approx((1 + 1 + 2 / 3 + 0) / 4)
    assert list(scores) == ["rouge_l", "exact_match", "maj@2", "pass@2"]
