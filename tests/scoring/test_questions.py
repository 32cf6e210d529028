"""Metrics of questions beside the official definitions of MultiRC and ReCoRD, stated once more."""

import collections
import re
import string

import numpy as np
import pytest

from jaxprompt.data.sources import splits as sources
from jaxprompt.data.tasks.readers.reading import read_all
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.data.text.encoded import MetricData
from jaxprompt.scoring import metrics
from jaxprompt.scoring.relations import collect_facts


def multirc(keys, gold, pred):
    """As the official script: F1 of all answers, and the share of questions without an error."""
    from sklearn.metrics import f1_score

    wrong = collections.Counter({key: 0 for key in keys})
    for key, g, p in zip(keys, gold, pred, strict=True):
        wrong[key] += int(g != p)
    return f1_score(gold, pred), np.mean([count == 0 for count in wrong.values()])


def normal(text):
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def record(row, said):
    """As the official script: the best of all right answers."""
    f1, exact = [], []
    for right in row["answers"]:
        a, b = normal(said).split(), normal(right).split()
        same = sum((collections.Counter(a) & collections.Counter(b)).values())
        f1.append(2 * same / (len(a) + len(b)) if same else 0)
        exact.append(normal(said) == normal(right))
    return max(f1), max(exact)


def read(name, folder):
    task = get_task(name)
    rows = sources.read_split(task, "dev", source=str(folder))
    examples = read_all(task, rows, rows.origin)
    return task, rows, examples, np.array([e.label for e in examples])


def test_multirc_is_scored_as_by_its_authors(shared):
    task, rows, examples, gold = read("multirc", shared / "data/multirc")
    keys = [tuple(row["idx"][part] for part in ("paragraph", "question")) for row in rows]
    for seed in range(5):
        pred = np.where(np.random.default_rng(seed).random(len(gold)) < 0.9, gold, 1 - gold)
        scores = metrics.score_predictions("f1a", gold, pred, collect_facts(task, examples))
        expected = multirc(keys, gold, pred)
        assert [scores["f1a"], scores["exact_match"]] == pytest.approx(expected)
        assert list(scores) == ["f1a", "exact_match", "accuracy"]
    assert 0 < expected[1] < 1


def test_record_is_scored_as_by_its_authors(shared):
    task, rows, examples, gold = read("record", shared / "data/record_32")
    whole = sources.read_split(get_task("sst2"), "dev", source=str(shared / "data/record_32"))
    assert len(examples) == sum(len(set(row["entities"])) for row in whole) > len(whole)
    assert not any("@placeholder" in example.fields["query"] for example in examples)
    for seed in range(5):
        scores = np.random.default_rng(seed).normal(size=(len(gold), 2))
        scores[:, 1] += 2 * gold
        value = metrics.score_predictions(
            "answer_f1", gold, scores.argmax(1), collect_facts(task, examples), scores
        )
        at, each = 0, []
        for row in whole:
            candidates = list(dict.fromkeys(row["entities"]))
            text_scores = scores[at : at + len(candidates)]
            at += len(candidates)
            each.append(
                record(row, candidates[int(np.argmax(text_scores[:, 1] - text_scores[:, 0]))])
            )
        assert [value["answer_f1"], value["exact_match"]] == pytest.approx(np.mean(each, axis=0))
    assert 0 < value["exact_match"] <= value["answer_f1"] < 1


@pytest.mark.parametrize("metric", ["f1a", "answer_f1"])
def test_the_class_of_right_answers_may_be_the_first(metric, shared):
    """The same scores as with the classes in their usual order."""
    task, _, examples, gold = read("record", shared / "data/record_32")
    scores = np.random.default_rng(0).normal(size=(len(gold), 2))
    scores[:, 1] += gold
    metric_data = collect_facts(task, examples)
    expected = metrics.score_predictions(metric, gold, scores.argmax(1), metric_data, scores)
    metric_data, swapped = metric_data._replace(positive=0), scores[:, ::-1]
    value = metrics.score_predictions(metric, 1 - gold, swapped.argmax(1), metric_data, swapped)
    assert value == expected and 0 < expected[metric] < 1


def test_a_question_without_a_right_answer_is_one_that_is_missed():
    nothing = [()] * 3
    metric_data = MetricData(
        ("no", "yes"), -1, nothing, nothing, [-1] * 3, 0, ["a", "a", "b"], list("xyx")
    )
    scores = np.array([[0, 1], [0, 2], [0, 1.0]])
    value = metrics.score_predictions("answer_f1", [0, 1, 0], [1, 1, 1], metric_data, scores)
    assert value == {"answer_f1": 0.5, "exact_match": 0.5, "accuracy": pytest.approx(1 / 3)}
    value = metrics.score_predictions("f1a", [0, 0, 0], [0, 0, 0], metric_data)
    assert value == {"f1a": 0.0, "exact_match": 1.0, "accuracy": 1.0}
