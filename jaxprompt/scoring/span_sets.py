"""Exact match and F1 of answers with several spans, as in DROP's official script.

Dua et al. 2019, "DROP", section 5; QUOREF (Dasigi et al. 2019) is scored the same way.
"""

import re
import string
from collections.abc import Sequence

import numpy as np

from jaxprompt.scoring import ratio
from jaxprompt.scoring.answer_words import HAN

METRICS = ("f1", "exact_match")
Spans = Sequence[str]


def score_span_sets(
    name: str, gold: Sequence[Sequence[Spans]], pred: Sequence[Spans]
) -> dict[str, float]:
    """Returns the metric `name` first, of f1 and exact_match, as fractions.

    gold: the right answers of each question, each of one or more spans; pred: the predicted spans.
    The best answer counts, by exact match and then by F1. Words are compared in lower case, without
    punctuation and articles; numbers by value. A right span with numbers matches a predicted span
    only if they share a number. A Chinese character is a word, which the script does not specify.
    Spans are aligned one to one so that F1 is highest; unaligned ones count 0. F1 of a question is
    rounded to two digits, as in the script.
    """
    scores_by_question = [
        max(_compare(answer, spans) for answer in answers)
        for answers, spans in zip(gold, pred, strict=True)
    ]
    exact, f1 = np.mean(scores_by_question, axis=0).tolist()
    scores = {"f1": f1, "exact_match": exact}
    return {name: scores[name], **scores}


def _compare(gold: Spans, pred: Spans) -> tuple[float, float]:
    """Compares two answers. -> exact match, F1"""
    right, predicted = ([_normalise(span) for span in spans] for spans in (gold, pred))
    exact = set(right) == set(predicted) and len(right) == len(predicted)
    return float(exact), round(_aligned([set(x.split()) for x in right], predicted), 2)


def _aligned(right: list[set[str]], spans: list[str]) -> float:
    """Averages the F1 of spans that are aligned one to one, over the longer of the two lists."""
    from scipy.optimize import linear_sum_assignment

    predicted = [set(span.split()) for span in spans]
    if not right or not predicted:
        return float(right == predicted)
    table = np.array(
        [[_f1(a, b) if _share_numbers(a, b) else 0.0 for b in predicted] for a in right]
    )
    rows, columns = linear_sum_assignment(table, maximize=True)
    return float(table[rows, columns].sum()) / max(len(right), len(predicted))


def _f1(right: set[str], predicted: set[str]) -> float:
    """Returns the F1 of two sets of words; precision or recall of an empty set is 1."""
    shared = len(right & predicted)
    precision, recall = ratio(shared, len(predicted), 1.0), ratio(shared, len(right), 1.0)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _share_numbers(right: set[str], predicted: set[str]) -> bool:
    """Returns whether a right answer has no number, or one of those predicted."""
    numbers = {word for word in right if _is_number(word)}
    return not numbers or bool(numbers & predicted)


def _normalise(text: str) -> str:
    parts = re.split(" |-", re.sub(f"([{HAN}])", r" \1 ", text))
    return " ".join(word for part in parts if (word := _word(part)))


def _word(part: str) -> str:
    part = part.lower()
    if not _is_number(part):
        part = "".join(letter for letter in part if letter not in string.punctuation)
    # Again, since 1,000 is a number without its comma.
    if _is_number(part):
        part = str(float(part))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", part).split())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
