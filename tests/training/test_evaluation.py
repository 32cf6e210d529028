"""Scores come back in the split's order; absent choices never win; -1 stands for no class."""

import numpy as np
import pytest

from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.encoded import Split
from jaxprompt.errors import InputError
from jaxprompt.heads import make_head
from jaxprompt.scoring.decisions import decide, drop_absent, probabilities
from jaxprompt.training.evaluation import predict_scores
from jaxprompt.types import Batch


def batches(*indices):
    for index in indices:
        index = np.array(index)
        yield Batch(None, None, None, None, index)


def step(_trainable, _frozen):
    return lambda batch: (batch.index, np.stack([batch.index * 1.0, -batch.index * 1.0], axis=1))


def answers(scores, names):
    """What a head with classes says of scores. [B, C], B names of C classes"""
    examples = [Example({}, tuple(labels)) for labels in names]
    size = len(examples)
    split = Split([], np.zeros(size), np.array([len(labels) for labels in names]), [()] * size)
    task = Task("t", ("text",), choices=("a",))
    return list(make_head("linear").answers(task, examples, split, scores, 2))


def test_scores_stand_in_the_order_of_the_split_and_filling_is_dropped():
    scores = predict_scores(step, {}, {}, batches([4, 0], [2, 1], [3, -1], [5, -1]), 6)
    np.testing.assert_array_equal(scores[:, 0], np.arange(6.0))
    np.testing.assert_array_equal(scores[:, 1], -np.arange(6.0))


def test_of_equal_scores_the_first_class_wins():
    """Also over a subword outside the verbalizer that is exactly as good; a better one is none."""
    scores = np.array([[0.3, 0.3, 0.3], [0.1, 0.3, 0.3], [0.3, 0.1, 0.3], [0.1, 0.3, 0.4]])
    assert decide(scores, 3).tolist() == [0, 1, 0, 2]
    assert decide(scores, 2).tolist() == [0, 1, 0, -1]
    predictions = [row["prediction"] for row in answers(scores[:, :2], ["ab"] * 4)]
    assert predictions == ["a", "b", "a", "b"]
    # The best score wins, although both probabilities round to 0.5.
    (row,) = answers(np.array([[0.0, 1e-9]], np.float32), ["ab"])
    assert row["prediction"] == "b" and row["score"] == 0.5


def test_choices_that_an_example_lacks_never_win():
    scores = np.array([[1.0, 2.0, 3.0, 9.0], [1.0, 2.0, 3.0, 9.0]])
    left = drop_absent(scores, np.array([2, 3]), 3)
    assert decide(left[:, :3], 3).tolist() == [1, 2]
    assert left[:, 3].tolist() == [9.0, 9.0]
    np.testing.assert_allclose(
        probabilities(left, 3)[0], [1 / (1 + np.e), np.e / (1 + np.e), 0.0], rtol=1e-6
    )


def test_nan_scores_are_no_result():
    def broken(batch):
        index, scores = step({}, {})(batch)
        return index, np.where(index[:, None] == 2, np.nan, scores)

    scores = predict_scores(lambda *_: broken, {}, {}, batches([3, 2], [1, 0]), 4)
    with pytest.raises(InputError, match="of 1 of 4 examples are NaN, first in example 3; "):
        make_head("linear").check_outputs(scores)
