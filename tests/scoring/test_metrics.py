"""Metrics against values worked out by hand and against scikit-learn's defaults."""

import subprocess
import sys

import numpy as np
import pytest
import sklearn.metrics

from jaxprompt.data.text.encoded import MetricData
from jaxprompt.errors import InputError
from jaxprompt.scoring import metrics

GOLD = [0, 0, 0, 1, 1, 1, 1, 0]
PRED = [0, 1, 0, 1, 0, 1, 1, 1]  # true 1: 3, false 1: 2, missed 1: 1, true 0: 2


def test_binary_by_hand():
    assert metrics.score_predictions("accuracy", GOLD, PRED) == {"accuracy": 5 / 8}
    assert list(metrics.score_predictions("f1", GOLD, PRED)) == ["f1", "accuracy"]
    assert metrics.score_predictions("f1", GOLD, PRED) == pytest.approx(
        {"f1": 6 / 9, "accuracy": 5 / 8}
    )
    f1_of_0 = 4 / 7
    macro = metrics.score_predictions("macro_f1", GOLD, PRED)
    assert macro == pytest.approx({"macro_f1": (6 / 9 + f1_of_0) / 2, "accuracy": 5 / 8})
    matthews = (3 * 2 - 2 * 1) / np.sqrt(5 * 4 * 4 * 3)
    assert metrics.score_predictions("matthews", GOLD, PRED)["matthews"] == pytest.approx(matthews)


@pytest.mark.parametrize("positive", [0, 1])
def test_f1_is_of_the_positive_class(positive):
    right = [(label,) for label in GOLD]
    metric_data = MetricData(("a", "b"), -1, right, right, [-1] * 8, positive=positive)
    expected = sklearn.metrics.f1_score(GOLD, PRED, pos_label=positive)
    assert metrics.score_predictions("f1", GOLD, PRED, metric_data)["f1"] == pytest.approx(expected)
    # So too of the examples that have a label alone.
    part = metric_data.select([True] * 5 + [False] * 3)
    expected = sklearn.metrics.f1_score(GOLD[:5], PRED[:5], pos_label=positive)
    assert metrics.score_predictions("f1", GOLD[:5], PRED[:5], part)["f1"] == pytest.approx(
        expected
    )


def test_each_of_several_right_classes_counts():
    """Of the second example classes 0 and 2 are right: said is the one that is not learned."""
    nothing = [()] * 3
    metric_data = MetricData(("a", "b", "c"), -1, [(0,), (0, 2), (1,)], nothing, [-1] * 3)
    gold, said = [0, 0, 1], [0, 2, 0]
    assert metrics.score_predictions("accuracy", gold, said, metric_data) == {"accuracy": 2 / 3}
    plain = metrics.score_predictions("accuracy", gold, said)
    assert plain == {"accuracy": 1 / 3}
    for name in ("macro_f1", "matthews"):
        scores = metrics.score_predictions(name, gold, said, metric_data)
        assert scores == metrics.score_predictions(name, [0, 2, 1], said) != plain
    ranks = np.array([[3.0, 2, 1], [2, 1, 3], [3, 1, 2]])
    scores = metrics.score_predictions("mrr", gold, said, metric_data, ranks)
    assert scores == {"mrr": (1 + 1 + 1 / 3) / 3, "hit_at_1": 2 / 3, "hit_at_10": 1.0}


def test_no_class_counts_as_wrong():
    pred = [-1 if i == 0 else p for i, p in enumerate(PRED)]  # row 0 was right
    assert metrics.score_predictions("accuracy", GOLD, pred) == {"accuracy": 4 / 8}
    assert metrics.score_predictions("f1", GOLD, pred)["f1"] == pytest.approx(6 / 9)
    macro = metrics.score_predictions("macro_f1", GOLD, pred)["macro_f1"]
    assert macro == pytest.approx((6 / 9 + 2 / 6) / 2)
    matthews = metrics.score_predictions("matthews", GOLD, pred)["matthews"]
    assert matthews < metrics.score_predictions("matthews", GOLD, PRED)["matthews"]
    wrong = [1 - GOLD[0], *PRED[1:]]
    assert matthews == metrics.score_predictions("matthews", GOLD, wrong)["matthews"]


@pytest.mark.parametrize("seed", range(3))
def test_many_classes_against_scikit_learn(seed):
    draw = np.random.default_rng(seed)
    gold, pred = draw.integers(0, 5, 200), draw.integers(0, 5, 200)
    expected = sklearn.metrics.f1_score(gold, pred, average="macro")
    assert metrics.score_predictions("macro_f1", gold, pred)["macro_f1"] == pytest.approx(expected)
    expected = sklearn.metrics.matthews_corrcoef(gold, pred)
    assert metrics.score_predictions("matthews", gold, pred)["matthews"] == pytest.approx(expected)


def test_macro_f1_averages_over_the_classes_of_gold_or_pred():
    """As scikit-learn does by itself: a class that is predicted and never right counts as 0, one
    that is in neither does not count.
    """
    gold, pred = np.array([0, 0, 1, 1]), np.array([0, 2, 1, 1])
    macro = metrics.score_predictions("macro_f1", gold, pred)["macro_f1"]
    assert macro == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert macro == pytest.approx(sklearn.metrics.f1_score(gold, pred, average="macro"))
    macro = metrics.score_predictions("macro_f1", pred, gold)[
        "macro_f1"
    ]  # in gold and never predicted
    assert macro == pytest.approx((2 / 3 + 1 + 0) / 3)


@pytest.mark.parametrize("seed", range(2))
def test_ranks_are_those_of_a_sorted_list(seed):
    """Of equal scores the first class ranks higher, as argmax picks it."""
    draw = np.random.default_rng(seed)
    gold, scores = draw.integers(0, 30, 80), draw.integers(0, 9, (80, 30)).astype(np.float32)
    order = np.argsort(-scores, axis=1, kind="stable")
    ranks = np.array([1 + [*row].index(g) for row, g in zip(order, gold, strict=True)])
    value = metrics.score_predictions("mrr", gold, order[:, 0], scores=scores)
    assert [*value] == ["mrr", "hit_at_1", "hit_at_10"]
    assert value["hit_at_1"] == np.mean(order[:, 0] == gold) == np.mean(ranks == 1)
    assert value["hit_at_10"] == np.mean(ranks <= 10) and 0 < value["hit_at_10"] < 1
    assert value["mrr"] == pytest.approx(np.mean(1 / ranks))
    worst = metrics.score_predictions(
        "mrr", gold, order[:, 0], scores=np.full((len(gold), 30), np.nan)
    )
    assert worst["hit_at_10"] == 0  # what is no number is not the best


def test_one_class_has_a_matthews_correlation_of_nothing():
    """Without the warning that scikit-learn prints, which a test takes for an error."""
    assert metrics.score_predictions("matthews", [1, 1], [1, 1])["matthews"] == 0.0
    assert metrics.score_predictions("matthews", [1, 1], [-1, 1])["matthews"] == 0.0


def test_answers_of_which_nothing_is_left_are_left_out():
    """As in SQuAD 2.0's script: "the" is no answer beside "Paris"."""
    score = lambda gold, pred: metrics.score_spans("f1", [gold], [pred])["f1"]
    assert score(["the", "Paris"], "") == 0.0 and score(["the", "Paris"], "Paris") == 1.0
    assert score(["the"], "") == 1.0 and score([""], "") == 1.0 and score([""], "Paris") == 0.0


def test_mean_and_population_std():
    assert metrics.mean_std([1.0, 2.0, 3.0, 6.0]) == pytest.approx((3.0, np.sqrt(14 / 4)))
    assert metrics.mean_std([0.5]) == (0.5, 0.0)


@pytest.mark.parametrize(
    "name, classes, kind, message",
    [
        ("acuracy", 2, "classes", "unknown metric 'acuracy'; nearest: accuracy"),
        ("f1", 3, "classes", "f1 needs 2 classes, but the task has 3; use macro_f1"),
        ("f1a", 3, "classes", "metric f1a needs 2 classes, but the task has 3"),
        ("micro_f1", 0, "texts", "micro_f1 compares classes, but the task writes text; use exact"),
        ("bleu", 2, "classes", "metric bleu compares texts, but the task has classes; use accur"),
    ],
)
def test_metrics_that_do_not_fit_a_task(name, classes, kind, message):
    with pytest.raises(InputError, match=message):
        metrics.check_metric(name, classes, kind)


@pytest.mark.parametrize("kind", metrics.METRICS_OF)
def test_metrics_fit_their_kind_of_task(kind):
    for name in metrics.METRICS_OF[kind]:
        metrics.check_metric(name, 2, kind)
    metrics.check_metric("f1", 0, "spans")


def test_import_is_light():
    code = "import sys, jaxprompt.scoring.metrics; assert not {'jax', 'sklearn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_language_models_scores_by_hand():
    actual = metrics.score_targets({"loss": 8 * np.log(2.0), "n": 4.0, "hits": 3.0})
    assert actual == pytest.approx({"loss": 2 * np.log(2.0), "accuracy": 0.75, "perplexity": 4.0})
    assert metrics.score_targets({"loss": 2e3, "n": 1.0, "hits": 0.0})["perplexity"] == np.inf
    empty = metrics.score_targets({"loss": 0.0, "n": 0.0, "hits": 0.0})
    assert all(np.isnan(value) for value in empty.values())


def test_the_loss_that_selects_a_pre_trained_prompt_is_its_first_score():
    """Which `show` and the plots show."""
    actual = metrics.score_classes({"loss": 3.0, "n": 4.0, "hits": 1.0}, 0.5)
    assert list(actual.items()) == [("loss", 0.75), ("accuracy", 0.25), ("majority", 0.5)]


def test_replaced_tokens_scores_are_sklearns():
    gold, pred = np.array([0, 0, 0, 0, 0, 1, 1, 1]), np.array([0, 0, 0, 1, 0, 1, 0, 1])
    sums = {
        "loss": 4.0, "n": 8.0, "hits": (gold == pred).sum(), "replaced": gold.sum(),
        "called": pred.sum(), "found": (gold & pred).sum(),
    }  # fmt: skip
    expected = {
        "loss": 0.5,
        "accuracy": sklearn.metrics.accuracy_score(gold, pred),
        "majority": sklearn.metrics.accuracy_score(gold, 0 * gold),
        "f1": sklearn.metrics.f1_score(gold, pred),
        "precision": sklearn.metrics.precision_score(gold, pred),
        "recall": sklearn.metrics.recall_score(gold, pred),
    }
    assert metrics.score_detection(sums) == pytest.approx(expected)
    none = metrics.score_detection(sums | {"called": 0, "found": 0})
    assert (none["f1"], none["precision"], none["recall"]) == (0, 0, 0)
