"""Scores of predicted classes, by scikit-learn behind one small interface."""

from collections.abc import Sequence

import numpy as np

from jaxprompt.errors import InputError, nearest

METRICS = ("accuracy", "f1", "macro_f1", "matthews")


def check_metric(name: str, num_classes: int) -> None:
    """Raises InputError for an unknown metric or one that `num_classes` classes cannot have."""
    if name not in METRICS:
        raise InputError(f"unknown metric {name!r}; {nearest(name, METRICS)}")
    if name == "f1" and num_classes != 2:
        raise InputError(f"metric f1 is of class 1 of 2, the task has {num_classes}; use macro_f1")


def score(
    name: str, gold: Sequence[int], pred: Sequence[int], num_classes: int
) -> dict[str, float]:
    """The metric `name`, first, and accuracy, as fractions. gold, pred: [examples]

    f1 is of class 1 of two; macro_f1 averages over the classes that occur in gold or pred; matthews
    is the correlation over all classes. pred = -1 (no class) is wrong.
    """
    check_metric(name, num_classes)
    gold, pred = np.asarray(gold), np.asarray(pred)
    if gold.shape != pred.shape or gold.ndim != 1 or not gold.size:
        raise ValueError(f"gold {gold.shape} and pred {pred.shape} must be equal, [examples]")
    if gold.min() < 0 or max(gold.max(), pred.max()) >= num_classes:
        raise ValueError(f"classes must be in [0, {num_classes}); only pred may be -1")
    scores = {"accuracy": float(np.mean(gold == pred))}
    if name != "accuracy":
        scores = {name: float(_sklearn(name, gold, pred)), **scores}
    return scores


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation (ddof 0, as LM-BFF reports)."""
    if not len(values):
        raise ValueError("no values to average")
    return float(np.mean(values)), float(np.std(values))


def _sklearn(name: str, gold: np.ndarray, pred: np.ndarray) -> float:
    from sklearn import metrics

    if name == "matthews":
        return metrics.matthews_corrcoef(gold, pred)
    classes = [1] if name == "f1" else np.setdiff1d(np.union1d(gold, pred), [-1])
    return metrics.f1_score(gold, pred, labels=classes, average="macro", zero_division=0)
