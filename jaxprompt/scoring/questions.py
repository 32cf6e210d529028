"""Metrics of questions whose candidate answers are separate examples, as in SuperGLUE.

Each candidate of a question is right or wrong separately: `MetricData.positive` is the class of
right ones, and `MetricData.questions` is the question of each (Wang et al. 2019, section 3.2:
MultiRC and ReCoRD).
"""

from collections.abc import Sequence

import numpy as np

from jaxprompt.data.text.encoded import MetricData
from jaxprompt.scoring import ratio
from jaxprompt.scoring.answer_words import answer_words, shared_words

METRICS = ("f1a", "answer_f1")


def score_questions(
    metric: str,
    metric_data: MetricData,
    gold: np.ndarray,
    pred: np.ndarray,
    scores: np.ndarray | None,
) -> dict[str, float]:
    """Returns the metric first, exact_match and accuracy, as fractions. gold, pred: [examples]

    See `score_candidates` and `score_best`, which needs `scores` [examples, 2].
    """
    by_question: dict[str, list[int]] = {}
    for example, question in enumerate(metric_data.questions):
        by_question.setdefault(question, []).append(example)
    examples_of = list(by_question.values())
    positive = metric_data.positive
    if metric == "f1a":
        measured = score_candidates(examples_of, gold, pred, positive)
    else:
        assert scores is not None
        measured = score_best(examples_of, metric_data.candidates, gold, scores, positive)
    return {**measured, "accuracy": float(np.mean(gold == pred))}


def score_candidates(
    examples_of: list[list[int]], gold: np.ndarray, pred: np.ndarray, right: int
) -> dict[str, float]:
    """Returns f1a: F1 of the candidates of the class `right`, over all questions, as in MultiRC.

    exact_match is the share of questions with a right prediction for every candidate. `examples_of`
    lists the examples of each question.
    """
    true_positives = int(((gold == right) & (pred == right)).sum())
    positives = int((gold == right).sum() + (pred == right).sum())  # in gold, and in pred
    exact = [bool((gold[examples] == pred[examples]).all()) for examples in examples_of]
    return {"f1a": ratio(2 * true_positives, positives), "exact_match": float(np.mean(exact))}


def score_best(
    examples_of: list[list[int]],
    texts: Sequence[str],
    gold: np.ndarray,
    scores: np.ndarray,
    positive: int,
) -> dict[str, float]:
    """Returns answer_f1: word F1 of each question's best candidate, averaged, as in ReCoRD.

    The best has the highest score of the class `positive` minus that of the other, the first of
    equal ones. It is compared with the most similar right candidate; exact_match is the share of
    questions where it is one of them. A question without a right candidate counts as 0.
    """
    margins, shares, exact = scores[:, positive] - scores[:, 1 - positive], [], []
    for examples in examples_of:
        best = answer_words(texts[examples[int(np.argmax(margins[examples]))]])
        right = [answer_words(texts[i]) for i in examples if gold[i] == positive]
        shares.append(max((shared_words(words, best) for words in right), default=0.0))
        exact.append(best in right)
    return {"answer_f1": float(np.mean(shares)), "exact_match": float(np.mean(exact))}
