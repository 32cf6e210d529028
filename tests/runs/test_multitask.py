"""Several tasks on one prompt: what is of one task and what is of all."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxprompt.runs import multitask
from jaxprompt.runs.multitask import SharedTrainStages
from jaxprompt.training.one_run import TrainOutcome
from jaxprompt.training.progress import Evaluation, Progress


class Scorer(SimpleNamespace):
    def fitted(self, dev):
        return Scorer(name=self.name, head=dev.get("threshold", self.head))


def make_tasks(splits=None, **metrics):
    return {
        name: SimpleNamespace(
            config=f"config {name}", metric=metric, splits=splits and splits[name],
            scorer=Scorer(name=name, head="none"),
        )
        for name, metric in metrics.items()
    }  # fmt: skip


def test_each_task_is_scored_and_exported_with_its_own_threshold(monkeypatch):
    """What head.tune chose on the dev of one task says nothing of another."""
    tasks, built = make_tasks(qa="f1", ner="f1", nli="accuracy"), {}

    def build_measure(config, scorer, placement):
        built[scorer.name] = config, scorer.head
        return f"fitted {scorer.name}"

    scored, exported = [], []
    score = lambda split, tasks, scores, numbers, frozen: scored.append((split, scores)) or {}
    monkeypatch.setattr(multitask, "make_metrics_fn", build_measure)
    monkeypatch.setattr(multitask, "_score_tasks", score)
    train, prompt = SimpleNamespace(test=True), SimpleNamespace(name="prefix")
    work = SharedTrainStages(SimpleNamespace(train=train, prompt=prompt, seed=0), "run")
    work._export = lambda prepared, job, fitted, ended, test: exported.append(fitted)
    prepared = SimpleNamespace(tasks=SimpleNamespace(by_name=tasks), placement=None)
    compiled = {name: f"compiled {name}" for name in tasks}
    job = SimpleNamespace(scores=compiled, frozen={}, state=SimpleNamespace(trainable={}))
    dev = {"mean": 0.5, "qa/f1": 0.6, "qa/threshold": 0.2, "ner/threshold": 0.7, "nli/accuracy": 1}
    ended = TrainOutcome(
        Progress(steps=9), Evaluation(step=7, value=0.5, dev=dev), trainable={}, time={}
    )
    result = work.finish(prepared, job, ended)
    assert (result.best_step, result.dev, result.tasks) == (7, dev, ("qa", "ner", "nli"))
    assert built == {"qa": ("config qa", 0.2), "ner": ("config ner", 0.7)}
    expected = {"qa": "fitted qa", "ner": "fitted ner", "nli": "compiled nli"}
    assert scored == [("test", expected)]
    heads = {name: scorer.head for name, scorer in exported[0].items()}
    assert heads == {"qa": 0.2, "ner": 0.7, "nli": "none"}


def test_the_mean_counts_each_task_by_its_metric_and_alike():
    """Each is measured with its own head; of some tasks alone there is no mean."""
    splits = {"qa": {"dev": "qa rows", "test": "more"}, "nli": {"dev": "nli rows"}}
    tasks, calls = make_tasks(splits, qa="f1", nli="accuracy"), []

    def measure(part, trainable, frozen):
        calls.append((part, sorted(trainable), sorted(frozen)))
        return {"f1": 0.75, "accuracy": 0.25, "exact_match": 0.5}

    trainable = {"prompt/table": 0, "head/qa/kernel": 1, "head/nli/kernel": 2}
    frozen, scores = {"backbone/x": 0}, dict.fromkeys(tasks, measure)
    actual = multitask._score_tasks("dev", tasks, scores, trainable, frozen)
    assert actual["mean"] == pytest.approx((0.75 + 0.25) / 2)
    assert actual["qa/f1"] == 0.75 and actual["nli/exact_match"] == 0.5 and len(actual) == 7
    leaves = ["head/main/kernel", "prompt/table"], ["backbone/x"]
    assert calls == [("qa rows", *leaves), ("nli rows", *leaves)]
    assert "mean" not in multitask._score_tasks("test", tasks, scores, trainable, frozen)


def test_what_a_task_uses_is_the_prompt_and_its_own_head():
    flat = {"prompt/table": 1, "head/qa/kernel": 2, "head/qa2/kernel": 3, "backbone/w": 4}
    expected = {"prompt/table": 1, "head/main/kernel": 2, "backbone/w": 4}
    assert multitask._select_params(flat, "qa") == expected


def test_counts_of_tokens_are_added_over_the_tasks():
    actual = multitask._sum_counts([np.array([1, 0, 2]), np.array([3, 4])])
    assert actual.tolist() == [4, 4, 2]
    assert multitask._sum_counts([np.array([1]), None]) is None
