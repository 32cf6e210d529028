"""Metrics of relations: the class of no relation is excluded, and an example may have several.

gold and pred are class indices; other facts are in a `MetricData` of data/text/encoded.py.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxprompt.data.tasks.readers.entities import ABSENT
from jaxprompt.data.tasks.task import Example, Task
from jaxprompt.data.text.encoded import MetricData
from jaxprompt.errors import InputError
from jaxprompt.scoring import ratio

METRICS = ("micro_f1", "semeval_f1", "f1c")
_DIRECTED = re.compile(r"(.+)\((?:e1,\s*e2|e2,\s*e1)\)")


def check_relations(metric: str, names: Sequence[str], negative: str) -> None:
    """Raises InputError if a metric of relations does not fit these classes."""
    if metric != "semeval_f1":
        return
    odd = [name for name in names if name != negative and not _DIRECTED.fullmatch(name)]
    if odd or not negative:
        raise InputError(
            f"metric semeval_f1 needs classes like Cause-Effect(e1,e2) and one named by "
            f"task.negative, not {odd[0] if odd else 'classes without that'!r}; use micro_f1"
        )


def score_relations(
    metric: str, metric_data: MetricData, gold: np.ndarray, pred: np.ndarray
) -> dict[str, float]:
    """Returns the metric first, and others of its kind, as fractions. gold, pred: [examples]

    pred = -1 (no class) counts as no relation. See `micro_f1`, `semeval_f1` and
    `conversational_f1`.
    """
    right = [set(classes) - {metric_data.negative} for classes in metric_data.correct]
    predicted = [{int(p)} - {metric_data.negative, -1} for p in pred]
    if metric == "f1c" and max(metric_data.pairs) >= 0:  # for whole dialogues it is micro_f1
        scores = conversational_f1(metric_data, right, predicted)
    else:
        scores = micro_f1(right, predicted)
        if metric == "semeval_f1":
            scores = {"semeval_f1": semeval_f1(metric_data, gold, pred), **scores}
    hits = [int(p) in classes for p, classes in zip(pred, metric_data.correct, strict=True)]
    return {**scores, "accuracy": float(np.mean(hits))}


def micro_f1(right: Sequence[set[int]], predicted: Sequence[set[int]]) -> dict[str, float]:
    """Returns micro-averaged F1, precision and recall over all right or predicted relations.

    As in TACRED's scorer and DialogRE's F1: precision is 1 if no relation is predicted.
    """
    hits = sum(len(gold & pred) for gold, pred in zip(right, predicted, strict=True))
    precision = ratio(hits, sum(map(len, predicted)), 1.0)
    recall = ratio(hits, sum(map(len, right)))
    return {"micro_f1": _mean(precision, recall), "precision": precision, "recall": recall}


def semeval_f1(metric_data: MetricData, gold: np.ndarray, pred: np.ndarray) -> float:
    """Returns the official score of SemEval-2010 task 8: (9+1)-way, with directionality.

    Macro-averaged F1 over the relations that are right for an example, without `Other`; 0 if there
    is none. Both directions of a relation are one class. A prediction of the right relation in the
    wrong direction is an error in both respects: it counts among the predictions of the relation
    and among its right examples.
    """
    base = [_DIRECTED.sub(r"\1", name) for name in metric_data.names]

    def relation_of(index: int) -> str:
        return "" if index in (-1, metric_data.negative) else base[index]

    golds, preds = [relation_of(int(g)) for g in gold], [relation_of(int(p)) for p in pred]
    # Compared with the direction, which `golds` and `preds` leave out.
    exact = [g for g, a, b in zip(golds, gold, pred, strict=True) if a == b]
    f1_scores = []
    for name in sorted(set(golds) - {""}):
        hits = exact.count(name)
        precision = ratio(hits, preds.count(name))
        f1_scores.append(_mean(precision, ratio(hits, golds.count(name))))
    return float(np.mean(f1_scores or [0.0]))


def conversational_f1(
    metric_data: MetricData, right: Sequence[set[int]], predicted: Sequence[set[int]]
) -> dict[str, float]:
    """Returns the conversational F1 of dialogues read turn by turn (Yu et al. 2020, section 4.2).

    A right relation counts from the turn that expresses it, any other from the turn by which both
    entities were named. Precision and recall are those of each pair of entities, averaged;
    precision is 1 if no relation is predicted.
    """
    sums: Mapping[int, list[int]] = {pair: [0, 0, 0] for pair in metric_data.pairs}
    turns = zip(metric_data.pairs, right, metric_data.expressed, predicted, strict=True)
    for pair, gold, classes, pred in turns:
        expressed = set(classes) - {metric_data.negative}
        # A right relation that this turn does not express yet is not an error.
        counted = {name for name in pred if name in expressed or name not in gold}
        for i, relations in enumerate((pred & expressed, counted, expressed)):
            sums[pair][i] += len(relations)
    precision = float(np.mean([ratio(hits, all_said, 1.0) for hits, all_said, _ in sums.values()]))
    recall = float(np.mean([ratio(hits, wanted) for hits, _, wanted in sums.values()]))
    return {"f1c": _mean(precision, recall), "precision_c": precision, "recall_c": recall}


def collect_facts(task: Task, examples: Iterable[Example]) -> MetricData:
    """Collects what metrics of relations and questions need to know of a task's examples."""
    names = task.labels
    index = {name: i for i, name in enumerate(names)}
    examples = list(examples)
    return MetricData(
        names=tuple(names),
        negative=index.get(task.negative, -1),
        correct=[tuple(index[n] for n in e.references) or (e.label,) for e in examples],
        expressed=[tuple(index[n] for n in e.expressed) for e in examples],
        pairs=[e.pair for e in examples],
        unmarked=sum(ABSENT in e.entities for e in examples),
        questions=[e.question for e in examples] if task.question else (),
        candidates=[e.fields[task.candidate] for e in examples] if task.candidate else (),
        positive=task.positive_class,
    )


def _mean(precision: float, recall: float) -> float:
    """Returns the harmonic mean."""
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
