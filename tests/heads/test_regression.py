"""Numbers as answers: the loss, the correlations, and what a card keeps."""

import math

import numpy as np
import pytest

from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.heads import make_head
from jaxprompt.scoring.metrics import score_numbers


def test_correlations_are_those_of_their_definitions():
    rng = np.random.default_rng(1)
    gold = rng.integers(0, 6, 40).astype(float)  # with ties
    pred = gold + rng.normal(0, 2, 40)
    actual = score_numbers("spearman", gold, pred)
    assert list(actual) == ["spearman", "pearson"]
    assert actual["pearson"] == pytest.approx(np.corrcoef(gold, pred)[0, 1])
    ranks = lambda x: [np.mean([(x < y).sum(), (x <= y).sum() - 1]) for y in x]
    assert actual["spearman"] == pytest.approx(np.corrcoef(ranks(gold), ranks(pred))[0, 1])
    assert score_numbers("pearson", gold, np.ones(40)) == {"pearson": 0.0, "spearman": 0.0}
    assert not any(map(math.isnan, score_numbers("pearson", [1.0], [2.0]).values()))


def test_an_answer_lies_within_the_limits_of_its_task():
    """As the number between 0 and 5 of STS-B; without limits it is what the layer gives."""
    actual, head = np.array([[-1.5], [2.25], [7.0]], np.float32), make_head("regression")
    answers = lambda task: [
        answer["prediction"] for answer in head.answers(task, (), None, actual, 1)
    ]
    assert answers(get_task("stsb")) == [0.0, 2.25, 5.0]
    assert answers(custom_task(fields=("text",), number="n")) == [-1.5, 2.25, 7.0]
