"""Several tasks on one prompt: what is of one task and what is of all."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxprompt.runs import multitask
from jaxprompt.runs import multitask as shared_tuning
from jaxprompt.runs.multitask import SharedTuning
from jaxprompt.training.one_run import Ended
from jaxprompt.training.progress import Evaluation, Progress


class Scorer(SimpleNamespace):
    def fitted(self, dev):
        return Scorer(name=self.name, task=self.task, head=dev.get("threshold", self.head))


def make_tasks(**metrics):
    return {name: Scorer(name=name, task=SimpleNamespace(metric=x), head="none")
            for name, x in metrics.items()}  # fmt: skip


def test_each_task_is_scored_and_exported_with_its_own_threshold(monkeypatch):
    """What head.tune chose on the dev of one task says nothing of another."""
    scorers, built, exported = make_tasks(qa="f1", ner="f1", nli="accuracy"), {}, []

    def build_measure(config, scorer, placement):
        built[scorer.name] = config, scorer.head
        return f"fitted {scorer.name}"

    monkeypatch.setattr(multitask, "build_measure", build_measure)
    scored = []
    work = SimpleNamespace(
        config=SimpleNamespace(
            train=SimpleNamespace(test=True), prompt=SimpleNamespace(name="prefix"), seed=0
        ),
        scorers=scorers, configs={name: f"config {name}" for name in scorers}, placement=None,
        scores={name: f"compiled {name}" for name in scorers}, frozen={},
        weights=SimpleNamespace(trainable={}),
        _score=lambda split, numbers, scores: scored.append((split, scores)) or {},
        _export=lambda numbers, fitted, dev, test: exported.append(fitted),
    )  # fmt: skip
    dev = {"mean": 0.5, "qa/f1": 0.6, "qa/threshold": 0.2, "ner/threshold": 0.7, "nli/accuracy": 1}
    ended = Ended(Progress(steps=9), Evaluation(step=7, value=0.5, dev=dev), numbers={}, time={})
    result = SharedTuning.finish(work, ended)
    assert (result.best_step, result.dev, result.tasks) == (7, dev, ("qa", "ner", "nli"))
    assert built == {"qa": ("config qa", 0.2), "ner": ("config ner", 0.7)}
    expected = {"qa": "fitted qa", "ner": "fitted ner", "nli": "compiled nli"}
    assert scored == [("test", expected)]
    assert {name: own.head for name, own in exported[0].items()} == {
        "qa": 0.2, "ner": 0.7, "nli": "none"
    }  # fmt: skip


def test_the_mean_counts_each_task_by_its_metric_and_alike():
    """Each is measured with its own head; of some tasks alone there is no mean."""
    parts = {"qa": {"dev": "qa rows", "test": "more"}, "nli": {"dev": "nli rows"}}
    seen = []

    def measure(part, trainable, frozen):
        seen.append((part, sorted(trainable), sorted(frozen)))
        return {"f1": 0.75, "accuracy": 0.25, "exact_match": 0.5}

    work = SimpleNamespace(
        splits=parts, frozen={"backbone/x": 0}, scorers=make_tasks(qa="f1", nli="accuracy")
    )
    trainable = {"prompt/table": 0, "head/qa/kernel": 1, "head/nli/kernel": 2}
    scores = dict.fromkeys(parts, measure)
    found = SharedTuning._score(work, "dev", trainable, scores)
    assert found["mean"] == pytest.approx((0.75 + 0.25) / 2)
    assert found["qa/f1"] == 0.75 and found["nli/exact_match"] == 0.5 and len(found) == 7
    own = ["head/main/kernel", "prompt/table"], ["backbone/x"]
    assert seen == [("qa rows", *own), ("nli rows", *own)]
    assert "mean" not in SharedTuning._score(work, "test", trainable, scores)


def test_what_a_task_uses_is_the_prompt_and_its_own_head():
    flat = {"prompt/table": 1, "head/qa/kernel": 2, "head/qa2/kernel": 3, "backbone/w": 4}
    expected = {"prompt/table": 1, "head/main/kernel": 2, "backbone/w": 4}
    assert shared_tuning._of_task(flat, "qa") == expected


def test_counts_of_tokens_are_added_over_the_tasks():
    found = shared_tuning._sum_counts([np.array([1, 0, 2]), np.array([3, 4])])
    assert found.tolist() == [4, 4, 2]
    assert shared_tuning._sum_counts([np.array([1]), None]) is None
