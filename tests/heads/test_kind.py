"""What all kinds of answers share."""

import re

import numpy as np
import pytest

from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.data.text.encoded import MetricData, Split
from jaxprompt.errors import InputError
from jaxprompt.heads import make_head
from jaxprompt.models.scorer import Scorer


def make_split(labels, counts):
    size = len(labels)
    return Split([[]] * size, np.array(labels), np.array(counts), [()] * size)


def test_examples_whose_answer_is_hidden_are_not_measured():
    """The answer is the best of the classes, though the last column, no class, is higher."""
    actual = np.array([[3, 1, 9], [1, 3, 9], [1, 3, 9], [3, 1, 9]], np.float32)
    head = make_head("linear")
    split = make_split([0, -1, 1, 1], [2] * 4)
    measured, count = head.measure_labelled("accuracy", [head.labelled(split, actual, 2)])
    assert measured == {"accuracy": pytest.approx(2 / 3)} and count == 3
    hidden = head.labelled(make_split([-1] * 4, [2] * 4), actual, 2)
    assert head.measure_labelled("accuracy", [hidden]) == ({}, 0)
    parts = [
        head.labelled(make_split(labels, [2] * len(labels)), rows, 2)
        for labels, rows in (([0], actual[:1]), ([-1], actual[1:2]), ([1, 1], actual[2:]))
    ]
    assert head.measure_labelled("accuracy", parts) == (measured, count)
    assert head.measure_labelled("accuracy", []) == ({}, 0)


@pytest.mark.parametrize(
    "metric, classes", [("accuracy", 2), ("f1", 2), ("matthews", 2), ("macro_f1", 3)]
)
def test_pairs_of_classes_have_the_metrics_of_the_examples(metric, classes):
    """To the last bit, in parts, one without a label; an example may have two right classes."""
    names, size, head = tuple("abc"[:classes]), 999, make_head("linear")
    task = custom_task(fields=("text",), label="label", labels=names, metric=metric)
    scorer = Scorer(task, head, "", *[None] * 6)
    rng = np.random.default_rng(0)
    scores, gold = rng.normal(size=(size, classes)), rng.integers(-1, classes, size)
    gold[:9] = -1
    right = [(int(label), int(rng.integers(classes))) for label in gold]
    data = MetricData(names, -1, right, [()] * size, [-1] * size, positive=0)
    examples, counted = [], []
    for part in np.split(np.arange(size), [9, 500]):
        split = make_split(gold[part], [classes] * len(part))
        split = split._replace(metric_data=data.select(np.isin(np.arange(size), part)))
        examples.append(head.labelled(split, scores[part], classes))
        counted.append(scorer.labelled(split, scores[part]))
    assert sum(len(part.gold) for part in counted) <= 2 * classes**2
    assert scorer.measure_labelled(counted) == head.measure_labelled(metric, examples)


def test_an_answer_outside_the_classes_is_wrong_and_counted():
    actual = np.array([[3, 1, 9], [3, 1, 2], [1, 3, 0], [3, 1, 0]], np.float32)
    measured = make_head("linear").measure("accuracy", make_split([0, 0, 1, 1], [2] * 4), actual, 2)
    assert measured == {"accuracy": 0.5, "other_words": 0.25}


def test_scores_that_are_nan_are_refused_with_their_number():
    actual = np.zeros((5, 2, 3), np.float32)
    make_head("linear").check_outputs(actual)
    actual[[2, 4], 1, 0] = np.nan
    with pytest.raises(InputError, match="of 2 of 5 examples are NaN, first in example 3;"):
        make_head("linear").check_outputs(actual)


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("discriminator", "score", "sigma"),
        ("discriminator", "loss", "total"),
        ("discriminator", "order", "seeded"),
        ("discriminator", "group", -1),
        ("discriminator", "order_seed", -1),
        ("discriminator", "order_seed", 2**32),
        ("label_rows", "scores", "all"),
        ("linear", "dropout", 1.0),
        ("linear", "pooler", "max"),
        ("multi_spans", "layer", "mlm"),
        ("multi_spans", "loss", "max"),
        ("multi_spans", "score", "sigma"),
        ("multi_spans", "stride", -2),
        ("multi_spans", "threshold", 1.0),
        ("spans", "max_answer", 0),
        ("spans", "n_best", 0),
        ("spans", "stride", -2),
        ("tags", "decode", "crf"),
        ("tags", "dropout", 1.0),
        ("tags", "stride", -2),
        ("verbalizer", "pieces", "max"),
        ("verbalizer", "scores", "all"),
        ("verbalizer", "span", "word"),
    ],
)
def test_a_field_out_of_range_is_named(name, field, value):
    with pytest.raises(InputError, match=re.escape(f"head.{field}={value!r}")):
        make_head(name, **{field: value})
